"""The formulas of the parts that shape rewards, by hand."""

import dataclasses
import math
import statistics
from pathlib import Path

import pytest
import torch

from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule
from rlhfkit.modules.parts.rewards import ClipRewards, MaskTruncated, MissingEndPenalty, NormalizeRewards, StopProperly
from rlhfkit.parts import Part

REWARDS = [1.0, -2.0, 0.5, 3.0, 0.0, math.nan]
CUT_OFF = [True, True, False, False, True, False]


def shaped(part: Part, rewards: list[float] = REWARDS) -> list[float]:
    """Rewards after a part, which belongs to a module that is not loaded."""
    if part.module is None:
        GRPOModule("no/model", parts=[part])
    rows = dataclasses.replace(experience(), rewards=torch.tensor(rewards), truncated=torch.tensor(CUT_OFF))
    return part.prepare(rows).rewards.tolist()


def stop_properly_formula(folder: Path) -> None:
    """In [0, 1] a factor of what is positive, below 0 the reward itself."""
    assert shaped(StopProperly(0.25))[:5] == [0.25, -2.0, 0.5, 3.0, 0.0]
    assert shaped(StopProperly(0.0))[:5] == [0.0, -2.0, 0.5, 3.0, 0.0]
    assert shaped(StopProperly(-1.5))[:5] == [-1.5, -1.5, 0.5, 3.0, -1.5]
    for coef in (1.5, math.nan):
        with pytest.raises(ValueError, match=r"StopProperly\.coef"):
            StopProperly(coef)


def missing_end_formula(folder: Path) -> None:
    """A difference."""
    assert shaped(MissingEndPenalty(0.75))[:5] == [0.25, -2.75, 0.5, 3.0, -0.75]
    for penalty in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"MissingEndPenalty\.penalty must be a finite number above 0"):
            MissingEndPenalty(penalty)


def normalize_formula(folder: Path) -> None:
    """Mean and deviation of all that was seen; what tokens earned is scaled only."""
    part = NormalizeRewards()
    seen: list[float] = []
    for rewards in (REWARDS, [2.0, 2.0, 1.0, 0.0, 0.0, 0.0]):
        seen += [value for value in rewards if not math.isnan(value)]
        mean, std = statistics.fmean(seen), statistics.stdev(seen)
        found = shaped(part, rewards)
        assert found == pytest.approx([(value - mean) / std for value in rewards], abs=1e-6, nan_ok=True)
    rows = experience()
    earned = torch.where(rows.action_mask, 0.5, 0.0)
    scaled = part.prepare(dataclasses.replace(rows, token_rewards=earned)).token_rewards
    assert scaled is not None
    std = statistics.stdev([*seen, *rows.rewards.tolist()])
    torch.testing.assert_close(scaled, earned / std)


def clip_formula(folder: Path) -> None:
    """Limits on both sides."""
    assert shaped(ClipRewards(0.75))[:5] == [0.75, -0.75, 0.5, 0.75, 0.0]
    with pytest.raises(ValueError, match=r"ClipRewards\.limit must be a finite number above 0"):
        ClipRewards(0.0)


def mask_formula(folder: Path) -> None:
    """No token of an answer that was cut off; all others' stay."""
    rows = dataclasses.replace(experience(), truncated=torch.tensor(CUT_OFF))
    part = MaskTruncated()
    GRPOModule("no/model", parts=[part])
    found = part.prepare(rows).action_mask
    for row, cut_off in enumerate(CUT_OFF):
        assert torch.equal(found[row], torch.zeros(6, dtype=torch.bool) if cut_off else rows.action_mask[row])
