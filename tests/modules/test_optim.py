"""Learning rates against Transformers' schedules of the same names."""

import pytest
import torch
from transformers import get_scheduler

from rlhfkit.modules.optim import SCHEDULES, learning_rate_factor


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 30])
def test_every_step_has_the_rate_that_transformers_gives_it(schedule: str, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer, warmup, 30)
    for step in range(30):
        factor = learning_rate_factor(step, schedule=schedule, warmup_steps=warmup, total_steps=30)
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        assert 0.0 <= factor <= 1.0
        optimizer.step()
        theirs.step()
