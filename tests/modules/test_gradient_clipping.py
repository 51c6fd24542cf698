"""Each model is clipped by its own norm under every strategy. Covers ``modules/base.py``."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import setup_run
from strategies import ranks

from .on_policy.ppo_cases import ARGUMENTS, PlainPPO

CLIP = 0.05
"""Below the norms of both gradients, which differ by far."""


class Gradients(L.Callback):
    """Norms of both models' gradients before and after clipping, where they can be seen."""

    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        names = ("policy", "critic")
        self.logged = {
            name: float(trainer.callback_metrics[f"grad_norm/{name}"])
            for name in names
            if f"grad_norm/{name}" in trainer.callback_metrics
        }


def run(folder: Path, strategy: str, **more: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights after four updates by SGD, whose steps are as long as the gradients, and the last norms."""
    seen = Gradients()
    trainer, module, data, _ = setup_run(
        folder,
        module=PlainPPO,
        module_arguments=ARGUMENTS,
        callbacks=[seen],
        strategy=strategy,
        **{"gradient_clip_val": CLIP} | more,
    )
    started = {}
    module.configure_model()
    started = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    trainer.fit(module, data)
    moved = {name: tensor.detach() - started[name] for name, tensor in module.named_parameters() if name in started}
    return moved, seen.logged


def under_engines(folder: Path, place: str) -> dict[str, float]:
    """What a rank of its own runs; a process group would stay behind in the process of the tests."""
    moved, norms = run(Path(place), "rlhf_zero2")
    torch.save(moved, folder / "moved.pt")
    return norms


def length(moved: dict[str, torch.Tensor], child: str) -> float:
    return float(torch.stack([one.norm() for name, one in moved.items() if name.startswith(child)]).norm())


@pytest.mark.distributed
def test_policy_and_critic_are_clipped_by_their_own_norms_as_under_the_strategy(tmp_path: Path) -> None:
    plain, norms = run(tmp_path, "auto")
    (theirs,) = ranks.run("modules.test_gradient_clipping:under_engines", 1, tmp_path / "rank", place=str(tmp_path))
    engines = torch.load(tmp_path / "rank" / "moved.pt")
    assert min(norms.values()) > CLIP
    assert norms == pytest.approx(theirs, rel=1e-3)
    assert plain.keys() == engines.keys()
    for name, expected in engines.items():
        torch.testing.assert_close(plain[name], expected, rtol=1e-4, atol=1e-7)


def test_one_clipped_step_of_each_is_as_long_as_the_limit(tmp_path: Path) -> None:
    moved, norms = run(tmp_path, "auto", max_epochs=1, max_steps=1)
    assert abs(norms["critic"] - norms["policy"]) > 0.5 * norms["policy"]
    for child in ("policy", "critic"):
        assert length(moved, child) == pytest.approx(0.05 * CLIP, rel=1e-3)  # rate times gradient


def test_values_are_clipped_one_by_one(tmp_path: Path) -> None:
    moved, _ = run(tmp_path, "auto", max_steps=1, gradient_clip_algorithm="value", gradient_clip_val=1e-3)
    largest = max(float(one.abs().max()) for one in moved.values())
    assert largest == pytest.approx(0.05 * 1e-3, rel=1e-2)
