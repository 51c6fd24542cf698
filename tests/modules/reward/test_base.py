"""What reward models and process reward models share: the loop by hand, validation on ranks, LoRA, saving."""

from pathlib import Path

import pytest
import torch
from strategies import ranks

from modules import scalar_cases
from modules.data_runs import folder_of
from modules.scalar_cases import KINDS
from rlhfkit.models import LoRA
from rlhfkit.models.lora import has_adapter

folder = folder_of(scalar_cases.prepare)


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_loop_by_hand(folder: Path, kind: str) -> None:
    start = scalar_cases.module(folder, kind)
    start.configure_model()
    losses, weights = scalar_cases.by_hand(folder, kind, start.save_pretrained(folder / f"{kind} start"))
    seen, module = scalar_cases.fit(folder, kind, 2, precision="64-true")
    # Llama's norms round to float32 in any precision, and padded or packed the last bits in front of them differ.
    assert seen == pytest.approx(losses, rel=3e-6)
    for name, tensor in module.policy.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
def test_two_ranks_validate_and_save_as_one(folder: Path, tmp_path: Path) -> None:
    reports = ranks.run("modules.scalar_cases:on_ranks", 2, tmp_path, model=str(folder))
    module = scalar_cases.module(folder, "reward")
    source = scalar_cases.data(folder, "reward", 14, validation_data=str(folder / "reward.jsonl"))
    alone = scalar_cases.trainer(folder).validate(module, source, verbose=False)[0]
    for report in reports:
        assert module.constants == pytest.approx(report.pop("constants"), rel=1e-5)
        assert report == pytest.approx(alone, rel=1e-5)
    for kind in KINDS:  # what two ranks of ZeRO stage 3 have saved is what one rank has trained
        saved = scalar_cases.module(folder, kind)
        saved.model_name = str(folder / f"{kind} of two ranks")
        saved.configure_model()
        _, trained = scalar_cases.fit(folder, kind, 1)
        for name, tensor in saved.policy.state_dict().items():
            torch.testing.assert_close(tensor, trained.policy.state_dict()[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_adapters_and_head_train_and_are_saved_merged(folder: Path, tmp_path: Path, kind: str) -> None:
    lora = LoRA(rank=4, alpha=8)
    straight = scalar_cases.module(folder, kind, lora=lora)
    source = scalar_cases.data(folder, kind, 4, validation_data=str(folder / f"{kind}.jsonl"))
    run = scalar_cases.trainer(tmp_path, max_epochs=4)
    run.fit(straight, source)
    trained = {name for name, parameter in straight.policy.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {
        name for name, _ in straight.policy.named_parameters() if name.startswith("model.score.")
    }
    fresh = scalar_cases.module(folder, kind)
    fresh.model_name = str(straight.save_pretrained(tmp_path / "saved"))
    fresh.configure_model()
    assert not has_adapter(fresh.policy)
    start = scalar_cases.module(folder, kind, lora=lora)
    start.configure_model()
    batch = next(iter(source.val_dataloader()))
    torch.testing.assert_close(fresh.scores(batch), straight.scores(batch), rtol=1e-4, atol=1e-5)
    assert (start.scores(batch) - straight.scores(batch)).abs().max() > 0.05

    first = scalar_cases.trainer(tmp_path, max_epochs=2)
    first.fit(scalar_cases.module(folder, kind, lora=lora), source)
    first.save_checkpoint(tmp_path / "lora.ckpt")
    resumed = scalar_cases.module(folder, kind, lora=lora)
    scalar_cases.trainer(tmp_path, max_epochs=4).fit(
        resumed, source, ckpt_path=tmp_path / "lora.ckpt", weights_only=True
    )
    for name, parameter in resumed.policy.named_parameters():
        assert torch.equal(parameter, straight.policy.get_parameter(name)), name
