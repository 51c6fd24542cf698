"""Divide an iteration's experience into micro-batches: which update trains on which row, on which rank."""

import dataclasses
from dataclasses import dataclass
from functools import partial

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.iteration import IterationSummary
from rlhfkit.data.packing import IterationShape, MicroBatch, iteration_shape, plan_micro_batches, split_groups_by_tokens
from rlhfkit.data.types import Experience
from rlhfkit.protocols import prompts_of


def shape_of(trainer: L.Trainer, group_size: int) -> IterationShape:
    """Updates and micro-batches of an iteration; with ``fast_dev_run=n``, n micro-batches of one group.

    Raises ValueError if the sizes do not divide.
    """
    fast = int(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set by Lightning outside its class
    if fast:
        return IterationShape(fast * trainer.world_size * group_size, fast, fast)
    data = prompts_of(trainer)
    return iteration_shape(
        data.rollout_batch_size,
        group_size,
        data.micro_batch_size,
        trainer.accumulate_grad_batches,
        trainer.world_size,
    )


@dataclass(frozen=True, eq=False)
class IterationPlan:
    """Who trains on which of an iteration's N sequences, and when; the same on every rank."""

    micro_batches: list[list[MicroBatch]]
    """``micro_batches[rank]``: those of a rank, in training order; equally many for every rank and update."""
    update: Tensor
    """(N,) int64, the optimizer update that trains on each sequence."""


def plan_iteration(summary: IterationSummary, shape: IterationShape, world_size: int) -> IterationPlan:
    """Choose the rows of every rank's micro-batches, of nearly equal tokens.

    Samples of a prompt are side by side.
    """
    lengths = summary.lengths.tolist()
    micro_batches = plan_micro_batches(
        lengths,
        num_updates=shape.updates,
        accumulate=shape.micro_batches_per_rank // shape.updates,
        world_size=world_size,
        split=partial(
            split_groups_by_tokens,
            lengths=lengths,
            prompts=summary.prompt_lengths.tolist(),
            groups=summary.group.tolist(),
            ranks=world_size,
        ),
    )
    update = torch.zeros(len(summary), dtype=torch.int64)
    for share in micro_batches:
        for planned in share:
            update[planned.rows] = planned.update
    return IterationPlan(micro_batches, update)


def micro_batch(experience: Experience, planned: MicroBatch, averaged: int) -> Experience:
    """The rows of one micro-batch, with the counts of its optimizer step (``averaged`` micro-batches on all ranks)."""
    whole = experience.action_mask[experience.update == planned.update]
    batch = experience.select(planned.rows)
    return dataclasses.replace(
        batch,
        # The first update's old log-probs are the policy's own.
        old_logprobs=None if planned.update == 0 else batch.old_logprobs,
        step_tokens=float(whole.sum()),
        step_sequences=float(whole.any(-1).sum()),
        step_micro_batches=averaged,
    )
