"""Deterministic permutations, so that no random state has to be saved."""

from hashlib import blake2b

import torch


def permutation(count: int, *, seed: int, number: int) -> list[int]:
    """Shuffled 0 .. ``count`` - 1, the same on every rank and after every restart.

    Args:
        count: Items.
        seed: Of the run.
        number: Of the pass or epoch, from 0.
    """
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()
