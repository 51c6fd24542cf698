"""Advantages per turn, against the formula written as loops."""

import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rl_runs import fit_run
from torch import Tensor

from rlhfkit.losses import group_advantages, turn_advantages
from rlhfkit.losses.advantages.gae import turn_ends

# Two prompts; turns of the policy as runs of 1, the environment's tokens as 0.
MASK = torch.tensor(
    [
        [1, 1, 0, 0, 1, 0, 1, 1],
        [1, 0, 1, 1, 1, 0, 0, 0],
        [0, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0, 0],
    ]
).bool()
GROUP = torch.tensor([7, 3, 7, 3, 3, 7])


def of(rewards: list[list[float]]) -> Any:
    """An iteration whose turns earn these rewards, each at the turn's last token."""
    earned = torch.zeros(MASK.shape)
    for row, (ends, values) in enumerate(zip(turn_ends(MASK), rewards, strict=True)):
        earned[row, ends.nonzero()[:, 0]] = torch.tensor(values)
    totals = torch.tensor([sum(values) for values in rewards])
    return SimpleNamespace(rewards=totals, group=GROUP, token_rewards=earned, action_mask=MASK)


REWARDS = [[0.5, 0.0, 1.0], [0.0, 1.0], [0.25, -1.0], [1.0], [0.0, 0.5, 0.5], [0.0, 0.0]]


def by_hand(rewards: list[list[float]], gamma: float, eps: float, scale: bool) -> Tensor:
    expected = torch.zeros(MASK.shape, dtype=torch.float64)
    for row, values in enumerate(rewards):
        among = [r for other, group in zip(rewards, GROUP, strict=True) if group == GROUP[row] for r in other]
        mean, spread = statistics.mean(among), statistics.stdev(among) + eps if scale else 1.0
        normal = [(value - mean) / spread for value in values]
        turn = 0
        for token, chosen in enumerate(MASK[row].tolist()):
            if chosen:
                expected[row, token] = sum(gamma**k * value for k, value in enumerate(normal[turn:]))
                turn += token + 1 == MASK.shape[1] or not MASK[row, token + 1]
    return expected


@pytest.mark.parametrize(("gamma", "eps", "scale"), [(1.0, 1e-4, True), (0.5, 1e-2, True), (0.0, 0.0, False)])
def test_a_token_has_the_normalized_rewards_of_its_turn_and_the_later_ones(
    gamma: float, eps: float, scale: bool
) -> None:
    found = turn_advantages(of(REWARDS), gamma=gamma, eps=eps, scale_std=scale)
    torch.testing.assert_close(found.double(), by_hand(REWARDS, gamma, eps, scale), rtol=1e-5, atol=1e-6)


def test_with_one_turn_each_it_is_grpo() -> None:
    mask = torch.zeros(6, 8).bool()
    mask[:, 2:5] = True
    rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    one = SimpleNamespace(rewards=rewards, group=GROUP, token_rewards=None, action_mask=mask)
    expected = group_advantages(rewards, GROUP)[:, None] * mask
    torch.testing.assert_close(turn_advantages(one), expected)


def test_order_changes_no_bit_a_sample_without_a_reward_counts_nowhere_and_equal_rewards_teach_nothing() -> None:
    def of_rows(rows: list[int]) -> Tensor:
        return turn_advantages(SimpleNamespace(**{name: value[rows] for name, value in vars(of(REWARDS)).items()}))

    assert torch.equal(of_rows([3, 0, 5, 2, 1, 4]), turn_advantages(of(REWARDS))[[3, 0, 5, 2, 1, 4]])
    missing = of(REWARDS)
    missing.rewards[1] = math.nan
    found = turn_advantages(missing)
    assert not found[1].any()
    assert torch.equal(found[[0, 2, 3, 4, 5]], of_rows([0, 2, 3, 4, 5]))
    assert not turn_advantages(of([[0.5] * len(values) for values in REWARDS])).any()
    with pytest.raises(ValueError, match="gamma must lie in"):
        turn_advantages(of(REWARDS), gamma=math.nan)


def test_a_module_takes_it_by_name(tmp_path: Path) -> None:
    trainer, _, _ = fit_run(tmp_path, module_arguments={"advantages": "turn_advantages"}, max_epochs=1)
    assert math.isfinite(trainer.callback_metrics["loss"])
