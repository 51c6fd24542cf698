"""What becomes of rewards before baselines and advantages, and answers that are not learned from.

``StopProperly``, ``MissingEndPenalty``, ``NormalizeRewards`` and ``ClipRewards`` act in the order in which they are
given; OpenRLHF clips after the baseline. Logs show the rewards before them. Example::

    PPOModule("sft", parts=[MissingEndPenalty(1.0), NormalizeRewards(), ClipRewards(10.0)])
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from rlhfkit.data.types import Experience
from rlhfkit.losses.advantages.rewards import RewardMoments, normalize_rewards
from rlhfkit.parts import Part, Stage
from rlhfkit.validation import check_number


class StopProperly(Part):
    """Scales the rewards of answers that the length limit cut off (ProRL v2; DAPO's overlong filter with 0).

    Hu et al. (ProRL v2, 2025) as OpenRLHF's ``stop_properly_penalty_coef``, which multiplies negative rewards too and
    so *improves* them; they stay the same here.

    Args:
        coef: In [0, 1]: positive rewards of such answers are multiplied by it, so that with 0 only finished answers are
            rewarded; below 0: it is their reward.

    Raises:
        ValueError: If ``coef`` is above 1.
    """

    stage, reads, writes = Stage.SHAPE, ("rewards", "truncated"), ("rewards",)

    def __init__(self, coef: float) -> None:
        check_number("StopProperly.coef", coef, maximum=1, why="1 is no penalty")
        self.coef = coef

    def prepare(self, rows: Experience) -> Experience:
        """Scale them; missing ones (NaN) stay missing."""
        rewards, coef = rows.rewards, self.coef
        if coef < 0.0:
            punished = rewards.where(rewards.isnan(), torch.full_like(rewards, coef))
        else:
            punished = torch.where(rewards > 0.0, rewards * coef, rewards)
        return dataclasses.replace(rows, rewards=punished.where(rows.truncated, rewards))


class MissingEndPenalty(Part):
    """Subtracts a number from the rewards of answers that the length limit cut off, as TRL's former PPO.

    Args:
        penalty: What is subtracted, in units of the reward at this place (1 in TRL's examples).

    Raises:
        ValueError: If ``penalty`` is not positive.
    """

    stage, reads, writes = Stage.SHAPE, ("rewards", "truncated"), ("rewards",)

    def __init__(self, penalty: float) -> None:
        check_number("MissingEndPenalty.penalty", penalty, above=0, why="it is subtracted")
        self.penalty = penalty

    def prepare(self, rows: Experience) -> Experience:
        """Subtract it."""
        return dataclasses.replace(rows, rewards=rows.rewards - self.penalty * rows.truncated.to(rows.rewards.dtype))


class NormalizeRewards(Part):
    """Shifts and scales rewards by the mean and deviation of all so far, this iteration's among them.

    Both are saved in checkpoints. ``token_rewards`` are differences of rewards, so they are scaled and not shifted.
    """

    stage, reads, writes = Stage.SHAPE, ("rewards", "token_rewards"), ("rewards", "token_rewards")

    def __init__(self) -> None:
        self.moments = RewardMoments.zero()
        """Count, mean and squared deviations of the rewards so far."""

    def prepare(self, rows: Experience) -> Experience:
        """Add the rewards of all ranks to the moments, and normalize."""
        # Not a sum over ranks: all rewards in the order of the iteration give the same bits on any number of ranks.
        self.moments = self.moments.update(self.module.ranks.gather_rows(rows, rows.rewards))
        mean, std = self.moments.mean, self.moments.std
        earned = rows.token_rewards
        earned = None if earned is None else normalize_rewards(earned, mean, std, shift_mean=False)
        return dataclasses.replace(rows, rewards=normalize_rewards(rows.rewards, mean, std), token_rewards=earned)

    def state_dict(self) -> dict[str, Any]:
        """The moments."""
        return {"moments": self.moments.plain()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with them."""
        self.moments = RewardMoments.of(state["moments"])


class ClipRewards(Part):
    """Clips rewards to ± ``limit``.

    Args:
        limit: In units of the reward at this place (10 in OpenRLHF; off in TRL's RLOO).

    Raises:
        ValueError: If ``limit`` is not positive.
    """

    stage, reads, writes = Stage.SHAPE, ("rewards",), ("rewards",)

    def __init__(self, limit: float) -> None:
        check_number("ClipRewards.limit", limit, above=0)
        self.limit = limit

    def prepare(self, rows: Experience) -> Experience:
        """Clip them."""
        return dataclasses.replace(rows, rewards=rows.rewards.clamp(-self.limit, self.limit))


class MaskTruncated(Part):
    """Learns nothing from answers that the length limit cut off (overlong filtering).

    DAPO: Yu et al., 2025, arXiv:2503.14476, section 3.4. Baselines still include their rewards; means of losses are
    over the other tokens.
    """

    stage, reads, writes = Stage.SELECT, ("action_mask", "truncated"), ("action_mask",)

    def prepare(self, rows: Experience) -> Experience:
        """Mask their tokens."""
        return dataclasses.replace(rows, action_mask=rows.action_mask & ~rows.truncated[:, None])
