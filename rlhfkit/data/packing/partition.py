"""Bins of nearly equal tokens: the largest differencing method, and best fit decreasing."""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_DIFFERENCING_LIMIT = 500_000


def balanced_partition(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Partition items into non-empty bins of nearly equal total length, by the largest differencing method.

    Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982), for several bins: start with one partition
    per item and merge the two most uneven, the fullest bin of one with the emptiest of the other, until one is left.
    Longest-first greedy (Graham, 1969) is used instead when its fullest bin is smaller, when differencing leaves a bin
    empty, and above 500,000 items times bins, where differencing would take seconds. Ties go to the smaller index.

    Args:
        lengths: Tokens of each item, 0 or more.
        num_bins: Bins.

    Returns:
        ``num_bins`` lists of indices, each ascending, together every index once.

    Raises:
        ValueError: If there are fewer items than bins, or a length is negative.
    """
    count = len(lengths)
    if num_bins < 1 or count < num_bins:
        raise ValueError(f"cannot partition {count} sequences into {num_bins} non-empty bins")
    if min(lengths) < 0:
        raise ValueError(f"lengths must be 0 or more, got {min(lengths)}")
    order = sorted(range(count), key=lambda index: (-lengths[index], index))
    bins = _longest_first(lengths, order, num_bins)
    if count * num_bins <= _DIFFERENCING_LIMIT:
        differenced = _differencing(lengths, order, num_bins)
        if all(differenced) and _fullest(lengths, differenced) <= _fullest(lengths, bins):
            bins = differenced
    return [sorted(rows) for rows in bins]


def split_by_tokens(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """:func:`balanced_partition` into micro-batches, fullest first; rank r of R takes bins r, r + R, r + 2R, ..."""
    bins = balanced_partition(lengths, num_bins)
    return sorted(bins, key=lambda rows: (-sum(lengths[index] for index in rows), rows[0]))


def _fullest(lengths: Sequence[int], bins: list[list[int]]) -> int:
    return max(sum(lengths[index] for index in rows) for rows in bins)


def _longest_first(lengths: Sequence[int], order: Sequence[int], num_bins: int) -> list[list[int]]:
    """Graham's greedy: the longest remaining item goes to the emptiest bin, empty bins first."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, 0, position) for position in range(num_bins)]
    for index in order:
        total, count, position = heap[0]
        bins[position].append(index)
        heapq.heapreplace(heap, (total + lengths[index], count + 1, position))
    return bins


_Tree = Any  # an index, or a pair of trees: joining two bins of any size takes one step
_Bin = tuple[int, int, _Tree]  # minus the total, an index in it (-1 in an empty bin), the items


def _differencing(lengths: Sequence[int], order: Sequence[int], num_bins: int) -> list[list[int]]:
    """Largest differencing."""
    # Bins of a partition are in descending order. Empty ones, its last, are left out, except where items of length 0
    # come behind them.
    explicit = not lengths[order[-1]]
    heap: list[tuple[int, int, list[_Bin]]] = []
    for number, index in enumerate(order):
        bins: list[_Bin] = [(-lengths[index], index, index)]
        if explicit:
            bins += [(0, -1, None)] * (num_bins - len(bins))
        heap.append((_difference(bins, num_bins), number, bins))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = _merge(one, other, num_bins)
        heapq.heappush(heap, (_difference(merged, num_bins), number, merged))
        number += 1
    bins = heap[0][2]
    return [_items(tree) for _, _, tree in bins] + [[] for _ in range(num_bins - len(bins))]


def _difference(bins: list[_Bin], num_bins: int) -> int:
    """Total of the emptiest bin minus that of the fullest."""
    return (0 if len(bins) < num_bins else -bins[-1][0]) + bins[0][0]


def _merge(one: list[_Bin], other: list[_Bin], num_bins: int) -> list[_Bin]:
    """Join the fullest bin of one partition with the emptiest of the other, and so on; changes its arguments."""
    if len(other) == 1 and num_bins > 1:  # the usual case: a single item, which joins the emptiest bin
        insort(one, _joined(one.pop(), other[0]) if len(one) == num_bins else other[0])
        return one
    if len(one) == 1 and num_bins > 1:
        insort(other, _joined(one[0], other.pop()) if len(other) == num_bins else one[0])
        return other
    alone, other_alone = num_bins - len(other), num_bins - len(one)
    joined = [_joined(one[place], other[num_bins - 1 - place]) for place in range(alone, len(one))]
    return sorted(one[:alone] + joined + other[:other_alone])


def _joined(one: _Bin, other: _Bin) -> _Bin:
    if one[1] < 0:
        return other
    return one if other[1] < 0 else (one[0] + other[0], one[1], (one[2], other[2]))


def _items(tree: _Tree) -> list[int]:
    """The indices in a tree, in no particular order."""
    items, trees = [], [] if tree is None else [tree]
    while trees:
        each = trees.pop()
        if isinstance(each, tuple):
            trees.extend(each)
        else:
            items.append(each)
    return items


def best_fit_decreasing(lengths: Sequence[int], capacity: int, order: Sequence[int] | None = None) -> list[list[int]]:
    """Partition items (1 token or more) into few bins of at most ``capacity``: longest first, each by best fit.

    At most 11/9 of the fewest possible bins plus four (Johnson, "Near-Optimal Bin Packing Algorithms", 1973).
    ``order``, a permutation, breaks ties between equal lengths; the smaller index first when ``None``. Indices in a bin
    are ascending.

    Raises:
        ValueError: If an item is longer than a bin.
    """
    items = sorted(range(len(lengths)) if order is None else order, key=lambda index: -lengths[index])
    if items and lengths[items[0]] > capacity:
        raise ValueError(f"a sequence of {lengths[items[0]]} tokens does not fit into {capacity}")
    bins: list[list[int]] = []
    levels: list[int] = []  # remaining capacities of bins, ascending
    with_room: dict[int, list[int]] = defaultdict(list)
    for index in items:
        place = bisect_left(levels, lengths[index])
        if place == len(levels):
            bins.append([])
            number, room = len(bins) - 1, capacity
        else:
            room = levels[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del levels[place]
        bins[number].append(index)
        room -= lengths[index]
        if room and not with_room[room]:
            insort(levels, room)
        with_room[room].append(number)
    return [sorted(rows) for rows in bins]
