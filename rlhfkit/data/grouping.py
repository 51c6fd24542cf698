"""Samples of one prompt side by side: the packed forward pass computes a prompt that neighbours share only once.

Keeping a whole group in one micro-batch saves the most; pieces of groups balance the ranks better. Both cost time, and
the time can be counted: :func:`deal_groups` tries pieces of several sizes and takes the one whose slowest ranks, step
by step, have the least to compute.
"""

from collections.abc import Iterable, Sequence

from rlhfkit.data.packing import deal


def tokens_computed(rows: Iterable[int], lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int]) -> int:
    """Tokens of a packed forward pass over some rows, each prompt counted once.

    Args:
        rows: Indices.
        lengths: Tokens of each sequence.
        prompts: Tokens of each sequence's prompt.
        groups: Equal for samples of one prompt.
    """
    total, seen = 0, set()
    for row in rows:
        total += lengths[row] - (prompts[row] if groups[row] in seen else 0)
        seen.add(groups[row])
    return total


def deal_groups(
    rows: Sequence[int],
    num_bins: int,
    *,
    lengths: Sequence[int],
    prompts: Sequence[int],
    groups: Sequence[int],
    ranks: int,
) -> list[list[int]]:
    """:func:`~rlhfkit.data.packing.deal` for sequences that share prompts.

    Args:
        rows: What is dealt: indices into the lists below, at least as many as bins.
        num_bins: Bins, a multiple of ``ranks``.
        lengths: Tokens of each sequence.
        prompts: Tokens of each sequence's prompt.
        groups: Equal for samples of one prompt.
        ranks: Bins i * ranks .. (i + 1) * ranks - 1 are computed at the same time.

    Returns:
        ``num_bins`` lists of rows, each ascending, together every row once.
    """
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(row)
    plans = []
    size = max(map(len, members.values()))
    while size >= 1:
        pieces = [each[first : first + size] for each in members.values() for first in range(0, len(each), size)]
        if len(pieces) >= num_bins:
            costs = [tokens_computed(piece, lengths, prompts, groups) for piece in pieces]
            bins = [sorted(row for index in chosen for row in pieces[index]) for chosen in deal(costs, num_bins)]
            totals = [tokens_computed(each, lengths, prompts, groups) for each in bins]
            slowest = sum(max(totals[first : first + ranks]) for first in range(0, num_bins, ranks))
            plans.append((slowest, bins))
        size //= 2
    return min(plans, key=lambda plan: plan[0])[1]
