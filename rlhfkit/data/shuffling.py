"""Permutations that are a function of what they are for, so that nothing about them has to be saved."""

from hashlib import blake2b

import torch


def permutation(count: int, *, seed: int, number: int) -> list[int]:
    """The order of one pass over the data, the same on every rank and after every restart.

    Args:
        count: Items.
        seed: Of the run.
        number: Of the pass or epoch, from 0.

    Returns:
        0 .. count - 1, shuffled.
    """
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()
