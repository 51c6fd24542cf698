"""Micro-batches of sequences that share prompts, which a packed forward pass computes once."""

from collections.abc import Iterable, Iterator, Sequence

from rlhfkit.data.packing.partition import split_by_tokens


def packed_tokens(rows: Iterable[int], lengths: Sequence[int], prompts: Sequence[int], groups: Sequence[int]) -> int:
    """Tokens of a packed forward pass over some rows, each prompt counted once; samples of one prompt share a group."""
    total, seen = 0, set()
    for row in rows:
        total += lengths[row] - (prompts[row] if groups[row] in seen else 0)
        seen.add(groups[row])
    return total


def padded_tokens(rows: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a forward pass over one or more rows that are padded to the longest."""
    return len(rows) * max(lengths[row] for row in rows)


def split_groups_by_tokens(
    rows: Sequence[int],
    num_bins: int,
    *,
    lengths: Sequence[int],
    prompts: Sequence[int],
    groups: Sequence[int],
    ranks: int,
) -> list[list[int]]:
    """:func:`split_by_tokens` for sequences that share prompts, which a packed forward pass computes once.

    Whole groups in one micro-batch save the most tokens, pieces of groups balance the ranks better. Pieces of several
    sizes are tried; the plan with the fewest tokens on the slowest ranks, step by step, is taken. Each ``ranks``
    consecutive bins run at the same time; ``num_bins`` is a multiple of ``ranks`` and at most the number of ``rows``.
    """
    plans = []
    for pieces in group_pieces(rows, groups):
        if len(pieces) >= num_bins:
            costs = [packed_tokens(piece, lengths, prompts, groups) for piece in pieces]
            bins = [
                sorted(row for index in chosen for row in pieces[index]) for chosen in split_by_tokens(costs, num_bins)
            ]
            totals = [packed_tokens(each, lengths, prompts, groups) for each in bins]
            slowest = sum(max(totals[first : first + ranks]) for first in range(0, num_bins, ranks))
            plans.append((slowest, bins))
    return min(plans, key=lambda plan: plan[0])[1]


def group_pieces(rows: Sequence[int], groups: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield divisions of the rows into pieces of groups: whole groups first, then halves, and so on to single rows."""
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(row)
    size = max(map(len, members.values()))
    while size >= 1:
        yield [each[first : first + size] for each in members.values() for first in range(0, len(each), size)]
        size //= 2
