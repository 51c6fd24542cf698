"""What a forward pass over rows costs, and micro-batches of at most a number of tokens.

verl's ``use_dynamic_bsz`` with ``ppo_max_token_len_per_gpu`` and OpenRLHF's ``train.dynamic_batch_enable`` with
``train.max_tokens_per_gpu`` do the same for sums of lengths; here the tokens are those that the forward pass computes,
and only a single sequence can exceed the limit.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from rlhfkit.data.packing import (
    MicroBatch,
    assign_to_ranks,
    best_fit_decreasing,
    data_ranks,
    rows_of_groups,
    split_by_tokens,
    update_windows,
)

Bins = list[list[int]]
"""Rows of each micro-batch."""


def group_pieces(rows: Sequence[int], groups: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield divisions of the rows into pieces of groups: whole groups first, then halves, and so on to single rows."""
    members = rows_of_groups(rows, groups)
    size = max(map(len, members))
    while size >= 1:
        yield [each[first : first + size] for each in members for first in range(0, len(each), size)]
        size //= 2


@dataclass(frozen=True)
class PackedCost:
    """Rows without padding, in which the prompt of a group is computed once for neighbouring rows."""

    lengths: Sequence[int]
    """Tokens of each sequence of the iteration, at least 1."""
    prompts: Sequence[int]
    """Tokens of its prompt."""
    groups: Sequence[int]
    """Equal for samples of one prompt, which are neighbours."""

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens that are computed: the sum of the lengths, each prompt counted once."""
        total, seen = 0, set()
        for row in rows:
            total += self.lengths[row] - (self.prompts[row] if self.groups[row] in seen else 0)
            seen.add(self.groups[row])
        return total

    def fill(self, rows: Sequence[int], max_tokens: int) -> Bins:
        """Divide rows, each of at most ``max_tokens``, into few bins of at most ``max_tokens``.

        By best fit of whole groups, halves of groups, and so on; the division into the fewest bins.
        """
        divisions = [
            self._rows(pieces, best_fit_decreasing([self.tokens(piece) for piece in pieces], max_tokens))
            for pieces in self._divisions(rows, max_tokens)
        ]
        return min(divisions, key=len)

    def _divisions(self, rows: Sequence[int], max_tokens: int) -> Iterator[Bins]:
        """Divisions into pieces of groups that fit: whole groups where they do, halves, and so on."""
        for pieces in group_pieces(rows, self.groups):
            yield [part for piece in pieces for part in self._fitting(piece, max_tokens)]

    @staticmethod
    def _rows(pieces: Bins, bins: Bins) -> Bins:
        """The rows of bins of pieces."""
        return [sorted(row for index in chosen for row in pieces[index]) for chosen in bins]

    def _fitting(self, piece: list[int], max_tokens: int) -> Bins:
        """Halve a piece of a group until its parts fit."""
        if self.tokens(piece) <= max_tokens:
            return [piece]
        middle = len(piece) // 2
        return [*self._fitting(piece[:middle], max_tokens), *self._fitting(piece[middle:], max_tokens)]

    def balance(self, rows: Sequence[int], num_bins: int, max_tokens: int) -> list[Bins]:
        """Divisions into ``num_bins`` bins of nearly equal tokens, of pieces of groups of several sizes.

        Some may exceed ``max_tokens``, or there is none.
        """
        return self._balanced(self._divisions(rows, max_tokens), num_bins)

    def _balanced(self, divisions: Iterable[Bins], num_bins: int) -> list[Bins]:
        return [
            self._rows(pieces, split_by_tokens([self.tokens(piece) for piece in pieces], num_bins))
            for pieces in divisions
            if len(pieces) >= num_bins
        ]

    def split(self, rows: Sequence[int], num_bins: int, *, ranks: int) -> Bins:
        """Divide rows into ``num_bins`` of nearly equal tokens, fullest first, a multiple of ``ranks``.

        Whole groups in one micro-batch save the most tokens, pieces of groups balance the ranks better. Pieces of
        several sizes are tried; the division with the fewest tokens on the slowest ranks, step by step, is taken. Each
        ``ranks`` consecutive bins run at the same time.
        """

        def slowest(bins: Bins) -> int:
            return sum(max(map(self.tokens, bins[first : first + ranks])) for first in range(0, num_bins, ranks))

        return min(self._balanced(group_pieces(rows, self.groups), num_bins), key=slowest)

    def halve(self, rows: Sequence[int]) -> Bins:
        """Between groups or inside one, whichever is better balanced."""
        return self.split(rows, 2, ranks=2)


@dataclass(frozen=True)
class PaddedCost:
    """Rows padded to the longest of them."""

    lengths: Sequence[int]
    """Tokens of each sequence of the iteration, at least 1."""
    groups: None = None
    """Rows of a group gain nothing from one another."""

    def tokens(self, rows: Sequence[int]) -> int:
        """Tokens that are computed, padding included: the number of rows times the longest."""
        return len(rows) * max(self.lengths[row] for row in rows)

    def _longest_first(self, rows: Sequence[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-self.lengths[row], row))

    def fill(self, rows: Sequence[int], max_tokens: int) -> Bins:
        """Longest first, as many as fit: the fewest bins that are possible."""
        ordered, bins = self._longest_first(rows), []
        while ordered:
            count = max_tokens // self.lengths[ordered[0]]
            bins.append(ordered[:count])
            ordered = ordered[count:]
        return bins

    def balance(self, rows: Sequence[int], num_bins: int, max_tokens: int) -> list[Bins]:
        """At most ``num_bins`` bins, filled up to the smallest number of tokens for which they are enough."""
        low, high = max(self.lengths[row] for row in rows), max_tokens
        while low < high:
            middle = (low + high) // 2
            if len(self.fill(rows, middle)) <= num_bins:
                high = middle
            else:
                low = middle + 1
        return [divided(self, self.fill(rows, low), num_bins)]

    def halve(self, rows: Sequence[int]) -> Bins:
        """The longer half and the shorter one."""
        ordered, middle = self._longest_first(rows), len(rows) // 2
        return [ordered[:middle], ordered[middle:]]


ForwardCost = PackedCost | PaddedCost
"""What a forward pass over some rows costs, and which rows go well together."""


def capped_batches(forward: ForwardCost, rows: Sequence[int], max_tokens: int) -> Bins:
    """Divide one or more rows into few batches of at most ``max_tokens``, fullest first; a longer row is alone."""
    bins = _fill(forward, rows, max_tokens)
    return _balance(forward, bins, len(bins), max_tokens, 1)


def plan_capped_micro_batches(
    forward: ForwardCost,
    num_rows: int,
    *,
    max_tokens: int,
    num_updates: int,
    world_size: int,
    ranks_per_forward: int = 1,
    order: Sequence[int] | None = None,
    uneven_epochs: int | None = None,
) -> list[list[MicroBatch]]:
    """Divide an iteration into updates and these into as few micro-batches of at most ``max_tokens`` as were found.

    All updates and ranks have equally many, because sharded models gather their weights in each. Update u takes the
    u-th contiguous, equal-count piece of ``order``; its micro-batches are of nearly equal tokens and assigned fullest
    first. A row of more than ``max_tokens`` is a micro-batch of its own. Where an update has fewer rows than
    micro-batches, the last are repetitions that are not trained on.

    Args:
        forward: What a forward pass over rows costs.
        num_rows: Sequences.
        max_tokens: Tokens of a micro-batch, of all ranks that share it.
        num_updates: Optimizer updates.
        world_size: Ranks.
        ranks_per_forward: Ranks that share a micro-batch; divides ``world_size``. Those without rows of it bring two
            tokens, which do not count.
        order: Rows in training order, which may repeat between updates; ascending when ``None``.
        uneven_epochs: See :func:`~rlhfkit.data.packing.update_windows`.

    Returns:
        ``plan[rank]``: the micro-batches of a rank, in training order.

    Raises:
        ValueError: If the updates do not divide the sequences, or an update has fewer sequences than ranks, or groups
            of ranks that share micro-batches.
    """
    rows = range(num_rows) if order is None else order
    windows = update_windows(rows, num_updates, uneven_epochs=uneven_epochs)
    at_once = world_size // ranks_per_forward
    if min(map(len, windows)) < at_once:
        raise ValueError(
            f"each of {num_updates} updates has {min(map(len, windows))} of {num_rows} sequences, fewer than "
            f"{data_ranks(world_size, ranks_per_forward)}: raise rollout_batch_size or lower updates_per_iteration"
        )
    filled = [_fill(forward, window, max_tokens) for window in windows]
    accumulate = max(ceil(len(bins) / at_once) for bins in filled)
    return assign_to_ranks(
        [_balance(forward, bins, accumulate * at_once, max_tokens, at_once) for bins in filled],
        forward.lengths,
        forward.groups,
        accumulate=accumulate,
        world_size=world_size,
        ranks_per_forward=ranks_per_forward,
    )


def _fill(forward: ForwardCost, rows: Sequence[int], max_tokens: int) -> Bins:
    """Bins of at most ``max_tokens``, or of one row."""
    too_long = {row for row in rows if forward.tokens([row]) > max_tokens}
    others = [row for row in rows if row not in too_long]
    return [[row] for row in sorted(too_long)] + (forward.fill(others, max_tokens) if others else [])


def _balance(forward: ForwardCost, bins: Bins, num_bins: int, max_tokens: int, ranks: int) -> Bins:
    """Divide the rows of some bins into at most ``num_bins`` as good, fullest first, of nearly equal tokens.

    There are fewer only if there are fewer rows.
    """
    too_long = [rows for rows in bins if forward.tokens(rows) > max_tokens]
    fitting = [rows for rows in bins if forward.tokens(rows) <= max_tokens]
    others = sorted(row for rows in fitting for row in rows)
    number = min(num_bins - len(too_long), len(others))
    if not number:
        return _fullest_first(forward, too_long)
    divisions = [*forward.balance(others, number, max_tokens), divided(forward, fitting, number)]
    possible = [each for each in divisions if max(map(forward.tokens, each)) <= max_tokens]
    # Each ``ranks`` consecutive bins run at the same time; the first of them is the slowest.
    return min(
        (_fullest_first(forward, too_long + each) for each in possible),
        key=lambda each: sum(forward.tokens(each[first]) for first in range(0, len(each), ranks)),
    )


def _fullest_first(forward: ForwardCost, bins: Bins) -> Bins:
    return sorted(map(sorted, bins), key=lambda rows: (-forward.tokens(rows), rows[0]))


def divided(forward: ForwardCost, bins: Bins, num_bins: int) -> Bins:
    """Halve the fullest bins of two rows or more until there are ``num_bins``."""
    heap = [(-forward.tokens(rows) if len(rows) > 1 else 0, number, rows) for number, rows in enumerate(bins)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) < num_bins:
        _, _, rows = heapq.heappop(heap)
        for half in forward.halve(rows):
            heapq.heappush(heap, (-forward.tokens(half) if len(half) > 1 else 0, number, half))
            number += 1
    return [rows for _, _, rows in heap]
