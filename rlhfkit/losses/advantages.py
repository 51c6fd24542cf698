"""Advantages from rewards: how much better an action was than what was to be expected.

Estimators with a group baseline take one reward per sequence (B,) and give one advantage per sequence; those with a
critic or discount take rewards per token (B, T), see :mod:`rlhfkit.losses.reward_shaping`. All are detached. Rows of a
group need not be adjacent, and groups may have any size. A reward of NaN is a missing one: it enters no statistic, and
its advantage is 0.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlhfkit.losses.masked import check_same_shape

AdvantageScale = Literal["group", "batch", "none"]
"""What centred rewards are divided by in :func:`group_advantages`."""


class _Groups(NamedTuple):
    """Rows by group, without dynamic shapes: group sums are scattered into B slots, of which some stay empty."""

    slot: Tensor  # (B,) int64, equal within a group
    present: Tensor  # (B,) bool: the reward is not NaN
    rewards: Tensor  # (B,) float64 where the device has it, 0 where missing

    def sum(self, values: Tensor) -> Tensor:
        """(B,) of every row: sum over the present rows of its group."""
        kept = torch.where(self.present, values, torch.zeros_like(values))
        return torch.zeros_like(kept).scatter_add(0, self.slot, kept)[self.slot]

    def extreme(self, reduce: Literal["amin", "amax"]) -> Tensor:
        """(B,) of every row: smallest or largest reward of its group."""
        fill = torch.inf if reduce == "amin" else -torch.inf
        kept = torch.where(self.present, self.rewards, torch.full_like(self.rewards, fill))
        return torch.full_like(kept, fill).scatter_reduce(0, self.slot, kept, reduce)[self.slot]

    @property
    def members(self) -> Tensor:
        """(B,) of every row: present rows of its group."""
        return self.sum(self.present.to(self.rewards.dtype))

    @property
    def varied(self) -> Tensor:
        """(B,) bool of every row: two rewards of its group differ. A rounded mean cannot tell."""
        return self.extreme("amax") > self.extreme("amin")


def group_advantages(rewards: Tensor, group: Tensor, *, scale: AdvantageScale = "group", eps: float = 1e-4) -> Tensor:
    """Advantage of a sample over the other samples of its prompt, as in GRPO.

    ``A_i = (r_i - mean(r_group)) / (s + ε)`` with ``s`` the standard deviation (unbiased, n-1) of the group's or of all
    rewards; ``scale="none"``: ``A_i = r_i - mean(r_group)``.

    Shao et al. (2024, arXiv:2402.03300, section 4.1.2); without the division Dr.GRPO (Liu et al., 2025,
    arXiv:2503.20783); by the batch's deviation Liu et al. ("Tricks or Traps", 2025, arXiv:2508.08221). TRL, verl and
    OpenRLHF differ in ``ε`` alone: 1e-4, 1e-6 and 1e-9. A group of equal rewards gets exactly 0: elsewhere the rounding
    of the mean divided by ``ε`` is taken for an advantage (OpenRLHF: -7.45 for eight rewards of 0.1).

    No host sync, no dynamic shapes, ``O(B log B)``. Sums run in float64 where the device has it, so that the order of
    rows does not matter.

    Args:
        rewards: (B,), NaN where missing. The whole batch: every row of a group must be in it.
        group: (B,) integer ids, equal for samples of one prompt.
        scale: ``group``, ``batch`` or ``none``.
        eps: ``ε`` added to the standard deviation; TRL's 1e-4.

    Returns:
        (B,) in at least float32; 0 for missing rewards and for groups with fewer than two.

    Raises:
        ValueError: If shapes are not (B,), ``scale`` is unknown or ``eps`` is negative.
    """
    if scale not in get_args(AdvantageScale):
        raise ValueError(f"scale must be one of {', '.join(get_args(AdvantageScale))}, got {scale!r}")
    if eps < 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    groups = _by_group(rewards, group)
    centred = groups.rewards - groups.sum(groups.rewards) / groups.members.clamp(min=1)
    if scale == "group":
        centred = centred / (_unbiased_std(groups.sum(centred.square()), groups.members) + eps)
    elif scale == "batch":
        everyone = groups.present.sum()
        from_mean = groups.rewards - groups.rewards.sum() / everyone.clamp(min=1)
        squares = torch.where(groups.present, from_mean, torch.zeros_like(from_mean)).square().sum()
        centred = centred / (_unbiased_std(squares, everyone) + eps)
    return _like_rewards(centred, groups.present & groups.varied, rewards)


def _by_group(rewards: Tensor, group: Tensor) -> _Groups:
    check_same_shape(rewards=rewards, group=group)
    if rewards.dim() != 1 or group.is_floating_point():
        raise ValueError(
            f"rewards must be (B,) and group (B,) integer ids, got {tuple(rewards.shape)} and {tuple(group.shape)} "
            f"of {group.dtype}"
        )
    rewards = rewards.detach()
    present = ~rewards.isnan()
    precise = rewards.to(torch.float32 if rewards.device.type == "mps" else torch.float64)
    ordered, order = group.sort(stable=True)
    starts = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).to(ordered.dtype)])
    slot = torch.zeros_like(order).scatter(0, order, starts.long().cumsum(0))
    return _Groups(slot, present, torch.where(present, precise, torch.zeros_like(precise)))


def _unbiased_std(squares: Tensor, count: Tensor) -> Tensor:
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _like_rewards(advantages: Tensor, keep: Tensor, rewards: Tensor) -> Tensor:
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return torch.where(keep, advantages, torch.zeros_like(advantages)).to(dtype)
