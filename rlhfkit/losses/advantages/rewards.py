"""Normalisation of rewards, and rewards per token; penalties and limits are parts (``modules/parts/rewards.py``)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhfkit.losses.advantages.group import precise
from rlhfkit.losses.aggregation import check_same_shape, full_precision, scalar_like, select


def last_action_mask(mask: Tensor) -> Tensor:
    """(B, T) bool, true at the last selected token of each row; false throughout a row without any."""
    chosen = mask.bool()
    after = chosen.flip(-1).cumsum(-1).flip(-1)
    return chosen & (after == 1)


def token_rewards(
    rewards: Tensor, mask: Tensor, *, penalty: Tensor | None = None, earned: Tensor | None = None
) -> Tensor:
    """Put the reward of a sequence on its last action, or where it was earned, and take a penalty from every action.

    ``r_t = e_t + 1[t is the last action] (r - Σ_s e_s) - p_t``

    ``e_t``: earned by the action and the environment's tokens after it, 0 without ``earned``. Without the penalty the
    rewards of a sequence sum to ``r``. InstructGPT, Ouyang et al. (2022, arXiv:2203.02155, equation 2), where
    ``p = β kl``.

    Args:
        rewards: (B,); NaN, a missing one, counts as 0.
        mask: (B, T), true where the policy chose the token. Masked entries may hold anything.
        penalty: (B, T) ``p``, such as 0.01 (OpenRLHF's β) times a :func:`kl_estimate` of the k1 kind; detached here.
            Masked entries may hold anything.
        earned: (B, T), the part of ``rewards`` that each token earned, detached here. The environment's tokens add to
            the action before them, or to the last action if there is none.

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask.

    Raises:
        ValueError: If shapes do not fit.
    """
    if rewards.shape != mask.shape[:1]:
        raise ValueError(f"rewards must be ({mask.shape[0]},), one per row of the mask, got {tuple(rewards.shape)}")
    check_same_shape(mask=mask, penalty=penalty, earned=earned)
    total = torch.nan_to_num(full_precision(rewards.detach()), nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    parts = None
    if earned is not None:
        scored = ~rewards.isnan().unsqueeze(-1).expand(mask.shape)
        parts = _by_action(select(full_precision(earned.detach()), scored), mask)
        total = total - parts.sum(-1)
    placed = select(total.unsqueeze(-1).expand(mask.shape), last_action_mask(mask))
    if parts is not None:
        placed = placed + parts
    return placed if penalty is None else placed - select(full_precision(penalty.detach()), mask)


def _by_action(earned: Tensor, mask: Tensor) -> Tensor:
    """(B, T): at each action the sum over itself and the tokens up to the next action; 0 elsewhere."""
    number = mask.long().cumsum(-1)  # 0 in front of the first action
    sums = earned.new_zeros(mask.shape[0], mask.shape[1] + 1).scatter_add(-1, number, earned)
    return select(sums.gather(-1, number), mask)


class RewardMoments(NamedTuple):
    """Count, mean and sum of squared deviations of all rewards seen.

    Start with ``RewardMoments.zero()``, ``update`` it with the rewards of all ranks of each batch, then call
    ``normalize_rewards(rewards, moments.mean, moments.std)``.
    """

    seen: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def zero(cls) -> "RewardMoments":
        """Moments of no rewards."""
        return cls(*torch.zeros(3, dtype=torch.float64))

    @classmethod
    def of(cls, saved: Sequence[float]) -> "RewardMoments":
        """Inverse of :meth:`plain`, from three numbers."""
        return cls(*torch.tensor(saved, dtype=torch.float64))

    def plain(self) -> list[float]:
        """Three numbers for a checkpoint."""
        return [float(moment) for moment in self]

    def update(self, rewards: Tensor) -> "RewardMoments":
        """Add rewards of any shape, ignoring NaN, exactly as if all had come at once (Chan et al., 1979)."""
        present = ~rewards.isnan()
        values = precise(torch.where(present, rewards.detach(), torch.zeros_like(rewards)))
        count = present.sum()
        mean = values.sum() / count.clamp(min=1)
        squares = torch.where(present, values - mean, torch.zeros_like(values)).square().sum()
        return self.merge(RewardMoments(count, mean, squares))

    def merge(self, other: "RewardMoments") -> "RewardMoments":
        """Add the rewards that ``other`` has seen, such as those of another rank (Chan et al., 1979)."""
        total = self.seen + other.seen
        shift = other.mean - self.mean
        return RewardMoments(
            total,
            self.mean + shift * other.seen / total.clamp(min=1),
            self.squares + other.squares + shift.square() * self.seen * other.seen / total.clamp(min=1),
        )

    @property
    def std(self) -> Tensor:
        """Unbiased standard deviation; 1 before two rewards have been seen."""
        deviation = (self.squares / (self.seen - 1).clamp(min=1)).sqrt()
        return torch.where(self.seen > 1, deviation, torch.ones_like(deviation))


def normalize_rewards(
    rewards: Tensor, mean: Tensor | float, std: Tensor | float, *, shift_mean: bool = True, eps: float = 1e-8
) -> Tensor:
    """Scale rewards with a given or running mean and deviation.

    ``(r - mean) / max(std, ε)``, without ``- mean`` unless ``shift_mean``.

    OpenRLHF so uses mean and deviation of a reward model's evaluation rewards, stored in its config.

    Args:
        rewards: Any shape; missing ones (NaN) stay missing.
        mean: Number or scalar, e.g. ``RewardMoments.mean``.
        std: Number or scalar, e.g. ``RewardMoments.std``.
        shift_mean: Subtract the mean, which changes the sign of rewards; a critic absorbs it.
        eps: Floor of the deviation; OpenRLHF's 1e-8.

    Returns:
        Tensor of the same shape, in at least float32.
    """
    values = full_precision(rewards)
    mean, std = scalar_like(mean, values), scalar_like(std, values)
    return (values - mean if shift_mean else values) / std.clamp(min=eps)
