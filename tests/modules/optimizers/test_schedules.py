"""Learning rates against Transformers' schedules of the same names."""

from typing import Any

import pytest
import torch

from rlhfkit.modules.optim import SCHEDULES, learning_rate_factor

STEPS = 30


def theirs(schedule: str, warmup: int, minimum: float) -> Any:
    """Transformers' schedule and its optimizer, of rate 1."""
    from transformers import get_scheduler, get_wsd_schedule

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if schedule == "wsd":
        return get_wsd_schedule(
            optimizer, warmup, 6, num_training_steps=STEPS, min_lr_ratio=minimum, decay_type="1-sqrt"
        )
    options: dict[str, Any] = {}
    if schedule == "cosine" and minimum:
        schedule, options = "cosine_with_min_lr", {"min_lr_rate": minimum}
    name = "constant_with_warmup" if schedule == "constant" else schedule
    return get_scheduler(name, optimizer, warmup, STEPS, scheduler_specific_kwargs=options)


@pytest.mark.parametrize(
    ("schedule", "warmup", "minimum"),
    [(schedule, warmup, 0.0) for schedule in SCHEDULES for warmup in (0, 1, 7, 23)]
    + [("cosine", 7, 0.1), ("wsd", 7, 0.1)],  # Transformers has no minimum for others
)
def test_every_step_has_the_rate_that_transformers_gives_it(schedule: str, warmup: int, minimum: float) -> None:
    expected = theirs(schedule, warmup, minimum)
    for step in range(STEPS):
        factor = learning_rate_factor(
            step, schedule=schedule, warmup_steps=warmup, total_steps=STEPS, minimum=minimum, decay_steps=6
        )
        if schedule != "wsd" or step >= warmup or not minimum:  # its warm-up begins at the minimum
            assert factor == pytest.approx(expected.get_last_lr()[0], abs=1e-12)
        assert 0.0 <= factor <= 1.0
        expected.optimizer.step()
        expected.step()


def test_every_schedule_that_ends_does_so_at_the_minimum() -> None:
    for schedule in ("linear", "cosine", "wsd"):
        options: dict[str, Any] = {"schedule": schedule, "warmup_steps": 3, "decay_steps": 5, "total_steps": STEPS}
        assert learning_rate_factor(STEPS, **options, minimum=0.25) == pytest.approx(0.25)
        assert learning_rate_factor(3, **options, minimum=0.25) == 1.0
