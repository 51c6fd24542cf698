"""The tokens of an iteration at which the policy has the highest entropy, chosen exactly over all ranks."""

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import all_reduce, cpu_group
from rlhfkit.losses import top_entropy_mask

_BINS = 1 << 16
_TIE = 1e-5


def highest_entropies(experience: Experience, entropy: Tensor, fraction: float) -> Tensor:
    """(B, T-1) bool, true at the trained tokens of highest entropy among those of the iteration. A collective.

    Tokens within 1e-5 nats of the last one are chosen too: the first tokens of a prompt's samples have one entropy, and
    rounding, which depends on the rows beside them, shall not choose among them.

    Args:
        experience: B sequences of this rank.
        entropy: (B, T-1) float32 of the policy before the iteration, in nats.
        fraction: Share of the tokens of all ranks, see :func:`~rlhfkit.losses.top_entropy_mask`.
    """
    mask = experience.action_mask
    values = entropy[mask]
    total = int(all_reduce(torch.tensor(values.numel()), group=cpu_group()))
    place = int(fraction * max(total - 1, 0) + 1e-4)  # as in top_entropy_mask
    threshold = nth_largest_of_all(values, place) - _TIE
    return top_entropy_mask(entropy, mask, fraction=fraction, threshold=threshold)


def nth_largest_of_all(values: Tensor, place: int) -> float:
    """The ``place``-th largest, counted from 0, of the float32 values of all ranks. A collective.

    Found by two histograms of 65,536 bins, of the first and of the last 16 bits of numbers that are ordered as the
    values are, so that ranks exchange 1 MiB whatever the number of values. Minus infinity if there are fewer.
    """
    bits = values.detach().float().contiguous().cpu().view(torch.int32).long()
    order = torch.where(bits >= 0, bits + (1 << 31), -1 - bits)  # unsigned, as the values are ordered
    high, left = _bin_of(order >> 16, place)
    if high < 0:
        return -torch.inf
    low, _ = _bin_of(order[order >> 16 == high] & (_BINS - 1), left)
    found = (high << 16) + low
    original = found - (1 << 31) if found >= 1 << 31 else -1 - found
    return float(torch.tensor(original, dtype=torch.int32).view(torch.float32))


def _bin_of(numbers: Tensor, place: int) -> tuple[int, int]:
    """The bin of the ``place``-th largest of all ranks' numbers, and its place in that bin; -1 if there are fewer."""
    counts = all_reduce(torch.bincount(numbers, minlength=_BINS), group=cpu_group())
    above = counts.flip(0).cumsum(0)  # numbers in the last bin, the last two bins ...
    behind = int((above <= place).sum())
    if behind == _BINS:
        return -1, 0
    return _BINS - 1 - behind, place - (int(above[behind - 1]) if behind else 0)
