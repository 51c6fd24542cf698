"""Rows of a batch by group: sums and extremes over the samples of a prompt, without waiting for the device.

What the estimators of :mod:`rlhfkit.losses.advantages.group` are made of. Rows of a group need not be adjacent and
groups may have any size; a reward of NaN is missing and enters no statistic.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import check_same_shape


class Groups(NamedTuple):
    """Rows by group, without dynamic shapes: group sums are scattered into B slots, of which some stay empty.

    Attributes:
        slot: (B,) int64, equal within a group.
        present: (B,) bool: the reward is not NaN.
        rewards: (B,) float64 where the device has it, 0 where missing. In float64 the order of rows does not show.
    """

    slot: Tensor
    present: Tensor
    rewards: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """(B,) of every row: sum over the present rows of its group.

        Args:
            values: (B,).
        """
        kept = torch.where(self.present, values, torch.zeros_like(values))
        return torch.zeros_like(kept).scatter_add(0, self.slot, kept)[self.slot]

    def extreme(self, values: Tensor, reduce: Literal["amin", "amax"]) -> Tensor:
        """(B,) of every row: smallest or largest value of its group.

        Args:
            values: (B,).
            reduce: ``amin`` or ``amax``.
        """
        fill = torch.inf if reduce == "amin" else -torch.inf
        kept = torch.where(self.present, values, torch.full_like(values, fill))
        return torch.full_like(kept, fill).scatter_reduce(0, self.slot, kept, reduce)[self.slot]

    @property
    def members(self) -> Tensor:
        """(B,) of every row: present rows of its group."""
        return self.sum(self.present.to(self.rewards.dtype))

    @property
    def centred(self) -> Tensor:
        """(B,) rewards minus the mean of their group."""
        return self.rewards - self.sum(self.rewards) / self.members.clamp(min=1)

    @property
    def std(self) -> Tensor:
        """(B,) of every row: unbiased standard deviation of its group, 0 for one member."""
        return (self.sum(self.centred.square()) / (self.members - 1).clamp(min=1)).sqrt()

    @property
    def varied(self) -> Tensor:
        """(B,) bool of every row: present, and two rewards of its group differ, which a rounded mean cannot tell."""
        return self.present & (self.extreme(self.rewards, "amax") > self.extreme(self.rewards, "amin"))


def by_group(rewards: Tensor, group: Tensor) -> Groups:
    """Sort rows into groups.

    Args:
        rewards: (B,), NaN where missing.
        group: (B,) integer ids in any order.

    Raises:
        ValueError: If the shapes are not (B,) or the ids not integers.
    """
    check_same_shape(rewards=rewards, group=group)
    if rewards.dim() != 1 or group.is_floating_point():
        raise ValueError(
            f"rewards must be (B,) and group (B,) integer ids, got {tuple(rewards.shape)} and {tuple(group.shape)} "
            f"of {group.dtype}"
        )
    rewards = rewards.detach()
    present = ~rewards.isnan()
    ordered, order = group.sort(stable=True)
    starts = torch.cat([torch.zeros_like(order[:1]), (ordered[1:] != ordered[:-1]).long()])
    slot = torch.zeros_like(order).scatter(0, order, starts.cumsum(0))
    rewards = precise(rewards)
    return Groups(slot, present, torch.where(present, rewards, torch.zeros_like(rewards)))


def precise(values: Tensor) -> Tensor:
    """Values in float64, or in float32 on Apple's devices, which have none.

    Args:
        values: Any shape.
    """
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def as_advantages(values: Tensor, keep: Tensor, rewards: Tensor) -> Tensor:
    """``values`` where ``keep`` is true and 0 elsewhere, in the dtype of ``rewards`` or float32 if that is narrower.

    Args:
        values: (B,).
        keep: (B,) bool.
        rewards: (B,), for the dtype.
    """
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return torch.where(keep, values, torch.zeros_like(values)).to(dtype)
