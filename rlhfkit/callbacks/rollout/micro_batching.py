"""An iteration's experience as micro-batches: which update trains on which row, and which rank computes it."""

import dataclasses
from functools import partial
from typing import Any

from rlhfkit.data.packing import IterationShape, MicroBatch, iteration_shape, plan_micro_batches, split_groups_by_tokens
from rlhfkit.data.types import Experience


def shape_of(trainer: Any, group_size: int) -> IterationShape:
    """How an iteration divides into updates and micro-batches.

    Args:
        trainer: With a DataModule that says ``rollout_batch_size`` and ``micro_batch_size``.
        group_size: Samples per prompt.

    Raises:
        ValueError: If it does not divide.
    """
    data = trainer.datamodule
    smoke = int(trainer.fast_dev_run)
    if smoke:  # that many micro-batches of one group each
        return IterationShape(smoke * trainer.world_size * group_size, smoke, smoke)
    return iteration_shape(
        data.rollout_batch_size,
        group_size,
        data.micro_batch_size,
        trainer.accumulate_grad_batches,
        trainer.world_size,
    )


def deal(experience: Experience, shape: IterationShape, ranks: int) -> list[list[MicroBatch]]:
    """Micro-batches of every rank; notes in the experience which update trains on which row.

    Args:
        experience: Of the whole iteration.
        shape: How it divides.
        ranks: That train.
    """
    lengths = experience.lengths.tolist()
    plan = plan_micro_batches(
        lengths,
        num_updates=shape.updates,
        accumulate=shape.micro_batches_per_rank // shape.updates,
        world_size=ranks,
        split=partial(
            split_groups_by_tokens,
            lengths=lengths,
            prompts=experience.prompt_lengths.tolist(),
            groups=experience.group.tolist(),
            ranks=ranks,
        ),
    )
    for share in plan:
        for micro_batch in share:
            experience.update[micro_batch.rows] = micro_batch.update
    return plan


def micro_batch(experience: Experience, one: MicroBatch, averaged: int) -> Experience:
    """The rows of one micro-batch, with the counts of its whole optimizer step.

    Args:
        experience: Of the whole iteration, prepared by the module.
        one: Which rows.
        averaged: Micro-batches of an optimizer step, of all ranks.
    """
    whole = experience.action_mask[experience.update == one.update]
    batch = experience.select(one.rows)
    return dataclasses.replace(
        batch,
        # In the first update the policy is still the one that sampled: its own log-probs are the old ones.
        old_logprobs=None if one.update == 0 else batch.old_logprobs,
        step_tokens=float(whole.sum()),
        step_sequences=float(whole.any(-1).sum()),
        step_micro_batches=averaged,
    )
