"""Which examples are trained on together: permutations, sizes of an iteration, micro-batches of nearly equal tokens.

Everything depends on lengths and seeds only: no state to save, and the same result on every rank.

May import: torch and ``validation.py``.
Start at :mod:`rlhfkit.data.packing.micro_batches`, then ``partition.py``.
"""

from rlhfkit.data.packing.micro_batches import (
    IterationShape,
    MicroBatch,
    capped_iteration_shape,
    data_ranks,
    deal_to_members,
    epoch_order,
    group_pieces,
    iteration_shape,
    packed_tokens,
    padded_tokens,
    permutation,
    plan_micro_batches,
    split_groups_by_tokens,
    update_windows,
)
from rlhfkit.data.packing.partition import balanced_partition, best_fit_decreasing, split_by_tokens

__all__ = [
    "IterationShape",
    "MicroBatch",
    "balanced_partition",
    "best_fit_decreasing",
    "capped_iteration_shape",
    "data_ranks",
    "deal_to_members",
    "epoch_order",
    "group_pieces",
    "iteration_shape",
    "packed_tokens",
    "padded_tokens",
    "permutation",
    "plan_micro_batches",
    "split_by_tokens",
    "split_groups_by_tokens",
    "update_windows",
]
