"""KTOModule against a loop written by hand; splits, ranks and resuming: ``test_step_properties.py``."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from modules import dpo_cases, kto_cases
from modules.data_runs import folder_of
from rlhfkit import KTOModule, UnpairedPreferenceDataModule
from rlhfkit.models import ModelLoading

pytestmark = pytest.mark.filterwarnings("ignore:the data has")


folder = folder_of(kto_cases.prepare)


def test_training_is_the_loop_by_hand(folder: Path) -> None:
    points, losses, weights = kto_cases.by_hand(folder)
    assert min(points) > 1  # the reference point counts: with 0 the losses would differ
    run = kto_cases.fit(folder, 2, knobs={"loading": ModelLoading(attention="eager")}, precision="64-true")
    assert run.kl == pytest.approx(points, rel=1e-10)
    assert run.totals == pytest.approx(losses, rel=1e-10)
    for name, tensor in run.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-6, atol=1e-12)


def test_a_reference_kept_on_disk_is_the_one_beside_the_policy(folder: Path, tmp_path: Path) -> None:
    knobs = dpo_cases.computed(tmp_path, model=str(folder / "reference"))
    beside, computed = kto_cases.fit(folder, 2), kto_cases.fit(folder, 2, knobs=knobs)
    assert len(list(tmp_path.iterdir())) == 1
    assert computed.kl == pytest.approx(beside.kl, rel=1e-5)
    assert computed.losses == pytest.approx(beside.losses, rel=1e-5)
    for name, tensor in computed.weights.items():
        torch.testing.assert_close(tensor, beside.weights[name], rtol=1e-5, atol=1e-6)


def test_a_step_costs_the_gradient_pass_and_one_without_gradient(folder: Path, tmp_path: Path) -> None:
    """TRL runs four: policy and reference, on the answers and on the mismatched ones."""
    passes: list[bool] = []
    module = kto_cases.made(folder, **dpo_cases.computed(tmp_path, model=str(folder / "reference")))

    class Count(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))

    kto_cases.trainer(folder, max_epochs=1, callbacks=[Count()]).fit(module, kto_cases.data(folder, 8))
    check = [False, False]  # of the rows of a fit's first batch
    assert passes == check + [False, True] * 3
    assert not hasattr(module, "reference")


def test_validation_does_not_depend_on_the_micro_batch_size_and_predictions_are_the_rewards(folder: Path) -> None:
    module = kto_cases.made(folder)
    seen = []
    for size in (5, 24):
        source = kto_cases.data(folder, size, validation_data=str(folder / "data.jsonl"))
        seen.append(kto_cases.trainer(folder).validate(module, source, verbose=False)[0])
    assert seen[0]["val/kl"] > 0
    assert seen[1] == pytest.approx(seen[0], rel=1e-4)
    (batch,) = source.val_dataloader()
    rewards = module.predict_step(batch, 0)
    for wanted, name in ((True, "chosen"), (False, "rejected")):
        found = float(rewards[batch.desirable == wanted].mean())
        assert found == pytest.approx(seen[0][f"val/rewards/{name}"], rel=1e-4)


def test_unbalanced_classes_are_warned_of_with_weights_that_fit(recwarn: pytest.WarningsRecorder) -> None:
    KTOModule("unused", desirable_weight=0.4).check_weights(30, 10)
    assert not recwarn.list
    module = KTOModule("unused")
    with pytest.warns(
        UserWarning, match=r"30 desirable and 10 undesirable.* 3.00 to 1.*desirable_weight between 0.33 and 0.50"
    ):
        module.check_weights(30, 10)


def test_data_with_one_prompt_is_refused(folder: Path) -> None:
    rows = [{"prompt": "?", "completion": text, "label": text == "a"} for text in "abcd"]
    data = UnpairedPreferenceDataModule(rows, micro_batch_size=4)
    module = KTOModule(str(folder / "model"))
    with pytest.raises(ValueError, match="at least two different prompts"):
        kto_cases.trainer(folder).fit(module, data)
    module = KTOModule(str(folder / "model"), loss_type="apo_zero_unpaired")
    kto_cases.trainer(folder, max_epochs=1).fit(module, data)
