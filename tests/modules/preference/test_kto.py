"""KTOModule: what a step costs, what is validated, and data that it cannot learn from."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from modules.data_runs import ROWS, computed, data, folder_of, plain_module, trainer
from rlhfkit import KTOModule, UnpairedPreferenceDataModule

pytestmark = pytest.mark.filterwarnings("ignore:the data has")

folder = folder_of()


def test_a_step_costs_the_gradient_pass_and_one_without_gradient(folder: Path, tmp_path: Path) -> None:
    """TRL runs four: policy and reference, on the answers and on the mismatched ones."""
    passes: list[bool] = []
    module = plain_module(folder, KTOModule, **computed(tmp_path))

    class Count(L.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            module.policy.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))

    trainer(folder, max_epochs=1, callbacks=[Count()]).fit(module, data(folder, KTOModule))
    check = [False, False]  # of the rows of a fit's first batch
    assert passes == check + [False, True] * 2
    assert not hasattr(module, "reference")


def test_validation_does_not_depend_on_the_micro_batch_size_and_predictions_are_the_rewards(folder: Path) -> None:
    module, seen = plain_module(folder, KTOModule), []
    for size in (5, ROWS):
        source = data(folder, KTOModule, size, validated=True)
        seen.append(trainer(folder).validate(module, source, verbose=False)[0])
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
    same = UnpairedPreferenceDataModule(rows, micro_batch_size=4)
    module = KTOModule(str(folder / "model"))
    with pytest.raises(ValueError, match="at least two different prompts"):
        trainer(folder).fit(module, same)
    module = KTOModule(str(folder / "model"), loss_type="apo_zero_unpaired")
    trainer(folder, max_epochs=1).fit(module, same)
