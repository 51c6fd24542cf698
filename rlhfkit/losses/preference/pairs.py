"""Pairs of answers among the samples of a prompt."""

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import check_same_shape


def best_and_worst(rewards: Tensor, group: Tensor) -> Tensor:
    """Choose the best and the worst sample of each group: 1 for the best, -1 for the worst, 0 for the others.

    ``y_c = argmax_i r_i`` and ``y_r = argmin_i r_i`` over the scored samples of a prompt, the first of equal ones.

    OAIF, Guo et al. (2024, arXiv:2402.04792) for two samples; the pairs of OpenRLHF's iterative DPO for more. Those
    make a pair of equal answers, too; here a group of equal rewards has none, since nothing was preferred.

    Args:
        rewards: (N,), NaN where missing.
        group: (N,) integers, equal for the samples of one prompt.

    Returns:
        (N,) of the dtype of ``rewards``.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(rewards=rewards, group=group)
    signs = torch.zeros_like(rewards)
    members: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(row)
    values = rewards.tolist()
    for rows in members.values():
        scored = [row for row in rows if values[row] == values[row]]  # NaN differs from itself
        if not scored:
            continue
        best, worst = max(scored, key=values.__getitem__), min(scored, key=values.__getitem__)
        if values[best] > values[worst]:
            signs[best], signs[worst] = 1.0, -1.0
    return signs


def pair_partners(signs: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rejected answer of each chosen one, with fixed shapes, so that nothing waits for the device.

    Args:
        signs: (B,) 1 for chosen answers, -1 for rejected ones, 0 for others; a group has at most one of each.
        group: (B,) integers, equal for the samples of one prompt.

    Returns:
        ``partners`` (B, B) bool, true at ``[i, j]`` if j is the rejected answer to the chosen i, and ``pairs`` (B,)
        bool, true for chosen answers that have one.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(signs=signs, group=group)
    partners = (group[:, None] == group) & (signs > 0)[:, None] & (signs < 0)
    return partners, partners.any(-1)


def rejected_values(partners: Tensor, values: Tensor) -> Tensor:
    """(B,) values of the rejected answers at the rows of the chosen ones, 0 elsewhere.

    A sum and no matrix product, which autocasting would compute in 16 bits.

    Args:
        partners: (B, B) from :func:`pair_partners`.
        values: (B,).
    """
    return torch.where(partners, values, 0).sum(-1)
