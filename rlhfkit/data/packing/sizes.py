"""Sizes of one iteration: how many sequences, micro-batches and updates it has."""

from dataclasses import dataclass
from math import ceil


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
