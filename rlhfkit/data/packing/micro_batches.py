"""The plan of an iteration: its updates and micro-batches, and the ranks that train on them.

Each update is divided **globally** into ``accumulate * world_size`` micro-batches of nearly equal tokens for the ranks,
so any number of ranks trains on the same updates. Ranks that compute their forward passes together
(``ranks_per_forward`` of them, a forward group of the mesh) share micro-batches: one is planned for all of them, then
:func:`deal_to_members` gives each member some of its rows.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhfkit.data.packing.partition import split_by_tokens
from rlhfkit.data.packing.sizes import data_ranks


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
    windows = update_windows(rows, num_updates)
    size, number = len(windows[0]), accumulate * (world_size // ranks_per_forward)
    if size < number:
        raise ValueError(
            f"each of {num_updates} updates has {size} of {len(rows)} sequences, too few for accumulate {accumulate} * "
            f"{data_ranks(world_size, ranks_per_forward)} = {number} micro-batches: raise rollout_batch_size or lower "
            "accumulate_grad_batches"
        )
    plan: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    for update, window in enumerate(windows):
        if split is None:
            chosen = split_by_tokens([lengths[row] for row in window], number)
            bins = [[window[index] for index in indices] for indices in chosen]
        else:
            bins = split(window, number)
        dealt = deal_to_members(bins, lengths, groups, world_size=world_size, ranks_per_forward=ranks_per_forward)
        for position, share in enumerate(dealt):
            plan[position % world_size].append(MicroBatch(share, update, trained=bool(share)))
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
        together: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            together[row if groups is None else groups[row]].append(row)
        pieces = list(together.values())
        parts: list[list[int]] = [[] for _ in range(ranks_per_forward)]
        if pieces:
            sizes = [sum(lengths[row] for row in piece) for piece in pieces]
            turn = position // (world_size // ranks_per_forward)
            for place, chosen in enumerate(split_by_tokens(sizes, min(ranks_per_forward, len(pieces)))):
                part = sorted(row for index in chosen for row in pieces[index])
                parts[(turn + place) % ranks_per_forward] = part
        dealt += parts
    return dealt


def update_windows(rows: Sequence[int], num_updates: int) -> list[list[int]]:
    """The rows of each update, ascending: contiguous pieces of equal counts. ValueError if they do not divide."""
    size, rest = divmod(len(rows), num_updates)
    if rest:
        raise ValueError(
            f"{num_updates} updates do not divide {len(rows)} sequences: choose rollout_batch_size * group_size as a "
            "multiple of micro_batch_size * accumulate_grad_batches * world_size"
        )
    return [sorted(rows[update * size : (update + 1) * size]) for update in range(num_updates)]
