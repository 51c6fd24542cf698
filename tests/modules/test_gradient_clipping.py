"""Each model is clipped by its own norm under every strategy. Covers ``modules/base.py``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import setup_run
from strategies import ranks

from .on_policy.ppo_cases import ARGUMENTS, PlainPPO

CLIP = 0.05
"""Below the norms of both gradients, which differ by far."""


def step(folder: Path, strategy: str, **more: Any) -> dict[str, torch.Tensor]:
    """How one update by SGD, of rate 0.05 and so as long as the gradients, moves the weights; checks their norms."""
    trainer, module, data, _ = setup_run(
        folder,
        module=PlainPPO,
        module_arguments=ARGUMENTS,
        strategy=strategy,
        max_steps=1,
        **{"gradient_clip_val": CLIP} | more,
    )
    module.configure_model()
    started = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    trainer.fit(module, data)
    policy, critic = (float(trainer.callback_metrics[f"grad_norm/{name}"]) for name in ("policy", "critic"))
    assert min(policy, critic) > CLIP
    assert abs(critic - policy) > 0.5 * policy
    return {name: tensor.detach() - started[name] for name, tensor in module.named_parameters() if name in started}


def check_length(moved: dict[str, torch.Tensor]) -> None:
    for child in ("policy", "critic"):
        length = torch.stack([one.norm() for name, one in moved.items() if name.startswith(child)]).norm()
        assert float(length) == pytest.approx(0.05 * CLIP, rel=1e-3)


def under_engines(folder: Path, place: str) -> None:
    """What a rank of its own runs; a process group would stay behind in the process of the tests."""
    check_length(step(Path(place), "rlhf_zero2"))


def test_one_clipped_step_of_each_model_is_as_long_as_the_limit(tmp_path: Path) -> None:
    check_length(step(tmp_path, "auto"))


@pytest.mark.distributed
def test_one_clipped_step_of_each_engine_is_as_long_as_the_limit(tmp_path: Path) -> None:
    ranks.run("modules.test_gradient_clipping:under_engines", 1, tmp_path / "rank", place=str(tmp_path))


def test_values_are_clipped_one_by_one(tmp_path: Path) -> None:
    moved = step(tmp_path, "auto", gradient_clip_algorithm="value", gradient_clip_val=1e-3)
    largest = max(float(one.abs().max()) for one in moved.values())
    assert largest == pytest.approx(0.05 * 1e-3, rel=1e-2)
