"""Permutations: functions of a seed and a number, the same on every rank and after every restart."""

from collections.abc import Sequence
from hashlib import blake2b

import torch


def permutation(count: int, *, seed: int, number: int) -> list[int]:
    """Shuffled 0 .. ``count`` - 1 of epoch ``number`` (from 0), the same on every rank and after every restart."""
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()


def epoch_order(groups: Sequence[int], epochs: int, *, seed: int, iteration: int) -> list[int]:
    """Rows of an iteration in training order, ``epochs`` times: first as they are, later shuffled by prompts.

    Samples of a prompt, which are side by side, stay so, because a forward pass computes a shared prompt once. The
    order is a function of the arguments alone.

    Args:
        groups: Equal for samples of one prompt.
        epochs: How often each row is trained on.
        seed: Seed of the shuffling.
        iteration: Number of the iteration.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    prompts, order = list(members.values()), list(range(len(groups)))
    for epoch in range(1, epochs):
        shuffled = permutation(len(prompts), seed=seed, number=iteration * epochs + epoch)
        order += [row for place in shuffled for row in prompts[place]]
    return order
