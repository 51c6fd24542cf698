"""What reward models and process reward models share: the loop by hand, splits, ranks, resuming, LoRA, saving."""

from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks

from modules import scalar_cases
from modules.scalar_cases import KINDS
from rlhfkit.models import LoRA, has_adapter


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scalar")
    scalar_cases.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """Losses and weights of both kinds, by hand."""
    found = {}
    for kind in KINDS:
        module = scalar_cases.module(folder, kind)
        module.configure_model()
        found[kind] = scalar_cases.by_hand(folder, kind, module.save_pretrained(folder / f"{kind} start"))
    return found


@pytest.mark.parametrize(("accumulate", "attention"), [(1, None), (4, None), (2, "eager")])
@pytest.mark.parametrize("kind", KINDS)
def test_52_steps_are_the_loop_by_hand_however_they_are_split(
    folder: Path, expected: dict[str, Any], kind: str, accumulate: int, attention: str | None
) -> None:
    losses, weights = expected[kind]
    assert len(losses) == 52
    assert losses[-1] < 0.7 * losses[0]
    seen, module = scalar_cases.fit(folder, kind, accumulate, attention=attention, precision="64-true")
    # Llama's norms round to float32 in any precision, and padded or packed the last bits in front of them differ.
    assert seen == pytest.approx(losses, rel=3e-6)
    for name, tensor in module.policy.model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
def test_two_ranks_train_for_52_steps_and_validate_as_one(
    folder: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    reports = ranks.run("modules.scalar_cases:on_ranks", 2, tmp_path, model=str(folder))
    for run in set(reports[0]) - {"validation"}:
        together = [(one + other) / 2 for one, other in zip(*(report[run] for report in reports), strict=True)]
        kind, strategy = run.split()
        wanted, rounding = expected[kind][0], 2e-5  # float32
        if strategy == "ddp":
            assert len(together) == 52
            rounding = 3e-6
        assert together == pytest.approx(wanted[: len(together)], rel=rounding), run
    module = scalar_cases.module(folder, "reward")
    source = scalar_cases.data(folder, "reward", 14, validation_data=str(folder / "reward.jsonl"))
    alone = scalar_cases.trainer(folder).validate(module, source, verbose=False)[0]
    for report in reports:
        assert module.constants == pytest.approx(report["validation"].pop("constants"), rel=1e-5)
        assert report["validation"] == pytest.approx(alone, rel=1e-5)
    for kind in KINDS:  # what two ranks of ZeRO stage 3 have saved is what one rank has trained
        saved = scalar_cases.module(folder, kind)
        saved.model_name = str(folder / f"{kind} of two ranks")
        saved.configure_model()
        _, trained = scalar_cases.fit(folder, kind, 1, max_epochs=2)
        for name, tensor in saved.policy.state_dict().items():
            torch.testing.assert_close(tensor, trained.policy.state_dict()[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_straight_one_to_the_bit(folder: Path, tmp_path: Path, kind: str) -> None:
    def run(epochs: int, **arguments: Any) -> Any:
        module = scalar_cases.module(folder, kind)
        source = scalar_cases.data(folder, kind, 2, validation_data=str(folder / f"{kind}.jsonl"))
        trainer = scalar_cases.trainer(tmp_path, accumulate_grad_batches=2, max_epochs=epochs)
        trainer.fit(module, source, **arguments)
        return trainer, module

    _, straight = run(4)
    trainer, first = run(2)
    trainer.save_checkpoint(tmp_path / "stopped.ckpt")
    _, resumed = run(4, ckpt_path=tmp_path / "stopped.ckpt", weights_only=True)
    other = first.policy.state_dict()
    for name, tensor in resumed.policy.state_dict().items():
        assert torch.equal(tensor, straight.policy.state_dict()[name])
        assert not torch.equal(tensor, other[name])
    if kind == "reward":
        assert resumed.constants == straight.constants != first.constants


@pytest.mark.parametrize("kind", KINDS)
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
