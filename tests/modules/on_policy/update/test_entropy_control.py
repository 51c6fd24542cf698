"""The entropy bonus that follows the policy's entropy, against the rule applied by hand."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import PlainGRPO, setup_run, weights

from rlhfkit import EntropyControl


class Watch(PlainGRPO):
    """Keeps the entropy of each optimizer step, and the weight of the bonus in it."""

    steps: dict[int, list[float]]

    def loss(self, batch: Any, out: Any) -> Any:
        if self._trainer is not None and torch.is_grad_enabled():
            entropy = float((out.entropy.detach() * batch.action_mask).sum()) / batch.step_tokens
            self.steps = getattr(self, "steps", {})
            kept = self.steps.setdefault(self.trainer.global_step, [0.0, self.entropy_controller.applied])
            kept[0] += entropy
        return super().loss(batch, out)


class Save(L.Callback):
    """Saves after the third optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def run(folder: Path, target: float, **arguments: Any) -> Any:
    control = EntropyControl(target=target, step=0.3)
    made = {"entropy_control": control, "lr": 0.1, "log_entropy": False}
    trainer, module, data, _ = setup_run(
        folder, module=Watch, module_arguments=made, max_epochs=3, callbacks=arguments.pop("callbacks", [])
    )
    trainer.fit(module, data, **arguments)
    return trainer, module


def test_the_weight_rises_below_the_target_falls_above_it_and_acts_below_only(tmp_path: Path) -> None:
    _, module = run(tmp_path, 100.0)
    first = [entropy for entropy, _ in module.steps.values()]
    assert [applied for _, applied in module.steps.values()] == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.2, 1.5])
    target = sorted(first)[2] + 1e-4  # crossed within the run
    path = tmp_path / "saved.ckpt"
    trainer, module = run(tmp_path, target, callbacks=[Save(path)])
    coefficient, expected = 0.0, [0.0]
    for entropy, _ in module.steps.values():
        coefficient = max(0.0, coefficient + (0.3 if entropy < target else -0.3))
        expected.append(coefficient if entropy <= target else 0.0)
    assert [applied for _, applied in module.steps.values()] == pytest.approx(expected[:-1])
    assert "policy/entropy_coef" in trainer.callback_metrics
    _, resumed = run(tmp_path, target, ckpt_path=str(path))
    assert resumed.entropy_controller.state_dict() == module.entropy_controller.state_dict()
    for name, tensor in weights(module).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
