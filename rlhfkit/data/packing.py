"""Which examples are trained on together: permutations, sizes of an iteration, micro-batches of nearly equal tokens.

Each update is divided **globally** into ``accumulate * world_size`` micro-batches of nearly equal tokens for the ranks,
so any number of ranks trains on the same updates. Ranks that compute their forward passes together
(``ranks_per_forward`` of them, a forward group of the mesh) share micro-batches: one is planned for all of them, then
:func:`deal_to_members` gives each member some of its rows.

Everything depends on lengths and seeds only: no state to save, and the same result on every rank.
"""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import Any

import torch

_DIFFERENCING_LIMIT = 500_000


def permutation(count: int, *, seed: int, number: int) -> list[int]:
    """Shuffled 0 .. ``count`` - 1 of epoch ``number`` (from 0), the same on every rank and after every restart."""
    digest = blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(count, generator=generator).tolist()


def rows_of_groups(rows: Iterable[int], groups: Sequence[int]) -> list[list[int]]:
    """The rows of each group, in the order of their first ones."""
    members: dict[int, list[int]] = {}
    for row in rows:
        members.setdefault(groups[row], []).append(row)
    return list(members.values())


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
    order = list(range(len(groups)))
    prompts = rows_of_groups(order, groups)
    for epoch in range(1, epochs):
        shuffled = permutation(len(prompts), seed=seed, number=iteration * epochs + epoch)
        order += [row for place in shuffled for row in prompts[place]]
    return order


@dataclass(frozen=True)
class IterationShape:
    """Sizes of one iteration of generating and learning."""

    sequences: int
    """Samples of all prompts, all ranks together: ``rollout_batch_size * group_size``."""
    micro_batches_per_rank: int
    """Batches of each rank's loader: ``updates * accumulate``; with a cap of tokens, the fewest there can be."""
    updates: int
    """Optimizer updates of all epochs; each trains on ``sequences * epochs / updates`` of the sequences."""
    epochs: int = 1
    """How often each sequence is trained on."""

    def repeated(self, epochs: int) -> "IterationShape":
        """The shape of an iteration that is trained on ``epochs`` times as often."""
        return IterationShape(
            self.sequences, self.micro_batches_per_rank * epochs, self.updates * epochs, self.epochs * epochs
        )


def iteration_shape(
    rollout_batch_size: int,
    group_size: int,
    micro_batch_size: int,
    accumulate: int,
    world_size: int,
    ranks_per_forward: int = 1,
) -> IterationShape:
    """Compute the sizes of one iteration.

    ``updates = rollout_batch_size * group_size / (micro_batch_size * accumulate * world_size / ranks_per_forward)``

    Args:
        rollout_batch_size: Prompts per iteration, all ranks together.
        group_size: Samples per prompt.
        micro_batch_size: Sequences per micro-batch on average (micro-batches have equal tokens, not equal counts).
        accumulate: Micro-batches per optimizer update and rank (``Trainer(accumulate_grad_batches)``).
        world_size: Ranks.
        ranks_per_forward: Ranks that share a micro-batch; divides ``world_size``.

    Raises:
        ValueError: If a size is below 1, or the sequences do not fill a whole number of updates.
    """
    sizes = {
        "rollout_batch_size": rollout_batch_size,
        "group_size": group_size,
        "micro_batch_size": micro_batch_size,
        "accumulate_grad_batches": accumulate,
        "world_size": world_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    sequences = rollout_batch_size * group_size
    window = micro_batch_size * accumulate * (world_size // ranks_per_forward)
    if sequences % window:
        below, above = sequences // window * window, ceil(sequences / window) * window
        nearby = " or ".join(str(total) for total in (below, above) if total)
        raise ValueError(
            f"an iteration has rollout_batch_size {rollout_batch_size} * group_size {group_size} = {sequences} "
            f"sequences, and an optimizer update takes micro_batch_size {micro_batch_size} * accumulate_grad_batches "
            f"{accumulate} * {data_ranks(world_size, ranks_per_forward)} = {window} of them, which does not divide "
            "it: change one of these five so that it does (with the same update, an iteration of "
            f"{nearby} sequences would)"
        )
    return IterationShape(sequences, sequences // window * accumulate, sequences // window)


def capped_iteration_shape(
    rollout_batch_size: int, group_size: int, updates_per_iteration: int, world_size: int, ranks_per_forward: int = 1
) -> IterationShape:
    """Compute the sizes of an iteration whose micro-batches have a cap of tokens, and no fixed number.

    Raises:
        ValueError: If the updates do not divide the sequences, or have fewer sequences than there are ranks, or groups
            of ranks that share micro-batches.
    """
    sequences = rollout_batch_size * group_size
    said = f"an iteration has rollout_batch_size {rollout_batch_size} * group_size {group_size} = {sequences} sequences"
    if sequences % updates_per_iteration:
        raise ValueError(
            f"{said}, which updates_per_iteration {updates_per_iteration} does not divide: change one of these three"
        )
    if sequences // updates_per_iteration < world_size // ranks_per_forward:
        raise ValueError(
            f"{said}, {sequences // updates_per_iteration} for each of updates_per_iteration {updates_per_iteration}: "
            f"fewer than {data_ranks(world_size, ranks_per_forward)}, and every rank trains in every update. Lower "
            "updates_per_iteration or raise rollout_batch_size"
        )
    return IterationShape(sequences, updates_per_iteration, updates_per_iteration)


def data_ranks(world_size: int, ranks_per_forward: int) -> str:
    """How many micro-batches are computed at the same time, for messages."""
    if ranks_per_forward == 1:
        return f"world_size {world_size}"
    return (
        f"{world_size // ranks_per_forward} data-parallel ranks (world_size {world_size}, of which {ranks_per_forward} "
        "each compute a forward pass together)"
    )


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass, and the optimizer update of the iteration they belong to."""

    rows: list[int]
    """Indices of sequences, ascending. None: the ranks that compute the forward pass together have rows for it, or
    none of them has; this one brings a sequence of two tokens."""
    update: int
    """0 .. updates - 1."""
    trained: bool = True
    """False: the rows are trained on elsewhere, and only computed so that all ranks run equally many forward passes."""


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    num_updates: int,
    accumulate: int,
    world_size: int,
    ranks_per_forward: int = 1,
    order: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    split: Callable[[list[int], int], list[list[int]]] | None = None,
    uneven_epochs: int | None = None,
) -> list[list[MicroBatch]]:
    """Divide an iteration into updates and micro-batches and assign these to the ranks.

    Update u takes the u-th contiguous, equal-count piece of ``order``. Its micro-batches are assigned fullest first:
    ranks that wait for each other then have equal work, and a lack of memory shows in the first micro-batch.

    Args:
        lengths: Tokens of each sequence.
        num_updates: Optimizer updates.
        accumulate: Micro-batches per update and rank.
        world_size: Ranks.
        ranks_per_forward: Ranks that share a micro-batch; divides ``world_size``.
        order: Indices into ``lengths`` in training order, which may repeat between updates; ascending when ``None``.
        groups: Equal for sequences that share a prompt, which then stay on one rank; ``None``: none do.
        split: Divides the rows of an update into micro-batches; :func:`split_by_tokens` when ``None``.
        uneven_epochs: See :func:`update_windows`. Where an update then has fewer rows than micro-batches, the last ones
            are repetitions that are not trained on.

    Returns:
        ``plan[rank]``: the ``num_updates * accumulate`` micro-batches of a rank, in training order.

    Raises:
        ValueError: If the updates do not divide the sequences, or an update has fewer sequences than micro-batches.
    """
    rows = list(range(len(lengths))) if order is None else list(order)
    if min(num_updates, accumulate, world_size) < 1:
        raise ValueError(
            f"num_updates, accumulate and world_size must be at least 1, got {num_updates}, {accumulate}, {world_size}"
        )
    windows = update_windows(rows, num_updates, uneven_epochs=uneven_epochs)
    size, number = min(map(len, windows)), accumulate * (world_size // ranks_per_forward)
    if size < (number if uneven_epochs is None else number // accumulate):
        raise ValueError(
            f"each of {num_updates} updates has {size} of {len(rows)} sequences, too few for accumulate {accumulate} * "
            f"{data_ranks(world_size, ranks_per_forward)} = {number} micro-batches: raise rollout_batch_size or lower "
            "accumulate_grad_batches"
        )
    bins = []
    for window in windows:
        filled = min(number, len(window) // (number // accumulate) * (number // accumulate))
        if split is None:
            chosen = split_by_tokens([lengths[row] for row in window], filled)
            bins.append([[window[index] for index in indices] for indices in chosen])
        else:
            bins.append(split(window, filled))
    return assign_to_ranks(
        bins, lengths, groups, accumulate=accumulate, world_size=world_size, ranks_per_forward=ranks_per_forward
    )


def assign_to_ranks(
    bins: Sequence[list[list[int]]],
    lengths: Sequence[int],
    groups: Sequence[int] | None,
    *,
    accumulate: int,
    world_size: int,
    ranks_per_forward: int,
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, in training order, ``accumulate`` in each update.

    Where an update has fewer, the last are none of its rows for ranks that compute forward passes together, else
    repetitions of the rank's shortest row that are not trained on.

    Args:
        bins: Rows of the micro-batches of each update, fullest first.
        lengths: Tokens of each row.
        groups: See :func:`deal_to_members`.
        accumulate: Micro-batches per update and rank.
        world_size: Ranks.
        ranks_per_forward: Ranks that share a micro-batch.
    """
    plan: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    for update, filled in enumerate(bins):
        every = [*filled, *([] for _ in range(accumulate * (world_size // ranks_per_forward) - len(filled)))]
        dealt = deal_to_members(every, lengths, groups, world_size=world_size, ranks_per_forward=ranks_per_forward)
        for position, share in enumerate(dealt):
            own = plan[position % world_size]
            rows_before = [row for one in own if one.update == update for row in one.rows]
            repeated = not share and ranks_per_forward == 1
            shown = [min(rows_before, key=lambda row: lengths[row])] if repeated else share
            own.append(MicroBatch(shown, update, trained=bool(share)))
    return plan


def deal_to_members(
    bins: list[list[int]],
    lengths: Sequence[int],
    groups: Sequence[int] | None = None,
    *,
    world_size: int,
    ranks_per_forward: int,
) -> list[list[int]]:
    """Divide micro-batches among the ranks that compute them together, each in parts of nearly equal tokens.

    With D = ``world_size / ranks_per_forward`` such groups of ranks, group g takes bins g, g + D, g + 2D, ... Who gets
    the fullest part changes from bin to bin, so that also bins of one row go around.

    Args:
        bins: Rows of each micro-batch, which may be none.
        lengths: Tokens of each row.
        groups: Equal for rows that share a prompt, which then stay together, as a rank computes a shared prompt once;
            ``None``: none do.
        world_size: Ranks.
        ranks_per_forward: Ranks that share a micro-batch; 1: the bins are returned.

    Returns:
        ``ranks_per_forward`` parts of each bin, some of them empty; rank r of R takes parts r, r + R, r + 2R, ...
    """
    if ranks_per_forward == 1:
        return bins
    dealt: list[list[int]] = []
    for position, rows in enumerate(bins):
        pieces = [[row] for row in rows] if groups is None else rows_of_groups(rows, groups)
        parts: list[list[int]] = [[] for _ in range(ranks_per_forward)]
        if pieces:
            sizes = [sum(lengths[row] for row in piece) for piece in pieces]
            turn = position // (world_size // ranks_per_forward)
            for place, chosen in enumerate(split_by_tokens(sizes, min(ranks_per_forward, len(pieces)))):
                part = sorted(row for index in chosen for row in pieces[index])
                parts[(turn + place) % ranks_per_forward] = part
        dealt += parts
    return dealt


def update_windows(rows: Sequence[int], num_updates: int, *, uneven_epochs: int | None = None) -> list[list[int]]:
    """The rows of each update, ascending: contiguous pieces of equal counts. ValueError if they do not divide.

    ``uneven_epochs``: Number of epochs of which the pieces may differ by one row, where groups have several sizes.
    """
    if uneven_epochs is not None:
        updates, size = num_updates // uneven_epochs, len(rows) // uneven_epochs
        return [
            sorted(rows[first + size * number // updates : first + size * (number + 1) // updates])
            for first in range(0, uneven_epochs * size, size)
            for number in range(updates)
        ]
    size, rest = divmod(len(rows), num_updates)
    if rest:
        raise ValueError(
            f"{num_updates} updates do not divide {len(rows)} sequences: choose rollout_batch_size * group_size as a "
            "multiple of micro_batch_size * accumulate_grad_batches * world_size"
        )
    return [sorted(rows[update * size : (update + 1) * size]) for update in range(num_updates)]


# -------------------------------------------------------------------------------------------------- bins


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
