"""Divide an iteration's experience into micro-batches: which update trains on which row, on which rank."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import lightning as L
import torch
from torch import Tensor

from rlhfkit.data.jagged import JaggedRows
from rlhfkit.data.packing import (
    IterationShape,
    MicroBatch,
    capped_iteration_shape,
    epoch_order,
    iteration_shape,
    plan_micro_batches,
    rows_of_groups,
)
from rlhfkit.data.token_cap import PackedCost, PaddedCost, plan_capped_micro_batches
from rlhfkit.data.types import Experience, IterationSummary
from rlhfkit.distributed import all_reduce
from rlhfkit.mesh import mesh_of
from rlhfkit.trainer_parts import compares_groups, epochs_of, learner_of, prompts_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class IterationPlan:
    """Who trains on which of an iteration's N sequences, and when; the same on every rank."""

    micro_batches: list[list[MicroBatch]]
    """``micro_batches[rank]``: those of a rank, in training order; equally many for every rank and update."""
    update: Tensor
    """(N,) int64, the optimizer update that trains on each sequence first."""
    owner: Tensor
    """(N,) int64, the rank that trains on each sequence first."""

    @property
    def own_rows(self) -> list[Tensor]:
        """``own_rows[rank]``: (n,) int64, ascending, the sequences that a rank trains on first; each is on one rank."""
        return [(self.owner == rank).nonzero()[:, 0] for rank in range(len(self.micro_batches))]

    @property
    def trained_rows(self) -> list[Tensor]:
        """``trained_rows[rank]``: (n,) int64, ascending, the sequences of a rank's micro-batches in any epoch."""
        rows = [sorted({row for planned in share for row in planned.rows}) for share in self.micro_batches]
        return [torch.tensor(each, dtype=torch.int64) for each in rows]

    @property
    def accumulate(self) -> int:
        """Micro-batches per update and rank."""
        return len(self.micro_batches[0]) // (self.micro_batches[0][-1].update + 1)


def plan_iteration(
    summary: IterationSummary,
    shape: IterationShape,
    world_size: int,
    *,
    ranks_per_forward: int = 1,
    max_tokens: int | None = None,
    packed: bool = True,
    whole_groups: bool = False,
    seed: int = 0,
    iteration: int = 0,
) -> IterationPlan:
    """Choose the rows of every rank's micro-batches, of nearly equal tokens.

    Args:
        summary: N sequences; samples of a prompt are side by side.
        shape: Number of epochs and updates, and of micro-batches unless there is a cap.
        world_size: Ranks.
        ranks_per_forward: Ranks that share a micro-batch; divides ``world_size``.
        max_tokens: Tokens that a forward pass may compute, on all these ranks together; ``None``: the number of
            micro-batches is given.
        packed: Whether forward passes leave padding out and compute a shared prompt once; counts with ``max_tokens``.
        whole_groups: Keep the samples of a prompt in one micro-batch, for losses that compare them.
        seed: Seed of the order of later epochs.
        iteration: Number of the iteration, for that order.
    """
    uneven = None if len(summary) == shape.sequences or whole_groups else shape.epochs  # groups of several sizes
    lengths, prompts, groups = summary.lengths.tolist(), summary.prompt_lengths.tolist(), summary.group.tolist()
    members = rows_of_groups(range(len(groups)), groups)
    if whole_groups:  # a group is planned as one sequence, as long as the tokens that it takes to compute it
        forward = PackedCost(lengths, prompts, groups) if packed else PaddedCost(lengths)
        lengths, prompts = [forward.tokens(rows) for rows in members], [0] * len(members)
        groups = list(range(len(members)))
    order = epoch_order(groups, shape.epochs, seed=seed, iteration=iteration)
    if max_tokens is None:
        at_once = world_size // ranks_per_forward
        micro_batches = plan_micro_batches(
            lengths,
            num_updates=shape.updates,
            accumulate=shape.micro_batches_per_rank // shape.updates,
            world_size=world_size,
            ranks_per_forward=ranks_per_forward,
            order=order,
            groups=groups,
            split=partial(PackedCost(lengths, prompts, groups).split, ranks=at_once),
            uneven_epochs=uneven,
        )
    else:
        micro_batches = plan_capped_micro_batches(
            PackedCost(lengths, prompts, groups) if packed else PaddedCost(lengths),
            len(lengths),
            max_tokens=max_tokens,
            num_updates=shape.updates,
            world_size=world_size,
            ranks_per_forward=ranks_per_forward,
            order=order,
            uneven_epochs=uneven,
        )
    if whole_groups:
        micro_batches = [
            [dataclasses.replace(one, rows=[row for group in one.rows for row in members[group]]) for one in share]
            for share in micro_batches
        ]
    update, owner = torch.zeros(2, len(summary), dtype=torch.int64)
    for rank, share in enumerate(micro_batches):
        for planned in share:
            if planned.trained and planned.update < shape.updates // shape.epochs:
                update[planned.rows], owner[planned.rows] = planned.update, rank
    return IterationPlan(micro_batches, update, owner)


def check_whole_groups(shape: IterationShape, group_size: int, world_size: int, ranks_per_forward: int) -> None:
    """Raise ValueError if an update has fewer groups than micro-batches, or not a whole number of them."""
    groups = shape.sequences // group_size * shape.epochs
    micro_batches = shape.micro_batches_per_rank * (world_size // ranks_per_forward)
    if groups % shape.updates or groups < micro_batches:
        raise ValueError(
            f"the module compares the {group_size} samples of a prompt, which therefore stay in one micro-batch, and "
            f"an iteration of {groups} groups has {shape.updates} updates of {micro_batches / shape.updates:g} "
            "micro-batches: raise PromptDataModule(micro_batch_size=...) to a multiple of SamplingSpec(group_size=...)"
        )


class IterationPlanner:
    """Plans the iterations of one run of a Trainer; what cannot change in a run is asked once, when it is made."""

    def __init__(self, trainer: L.Trainer, group_size: int) -> None:
        self.group_size = group_size
        self._trainer = trainer
        self._data = prompts_of(trainer)
        self._learner = learner_of(trainer)
        self._mesh = mesh_of(trainer)
        self._whole_groups = compares_groups(self._learner)
        self._epochs = epochs_of(trainer)
        self._fast = int(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set by Lightning outside its class
        self._warned = False

    @property
    def shape(self) -> IterationShape:
        """Updates and micro-batches of an iteration; with ``fast_dev_run=n``, n micro-batches of one group.

        With ``max_tokens_per_micro_batch`` the micro-batches are the fewest that are possible, one per update. Both are
        those of all epochs of the iteration. Raises ValueError if the sizes do not divide.
        """
        data, group_size, ranks = self._data, self.group_size, (self._mesh.world_size, self._mesh.forward_group_size)
        if self._fast:
            return IterationShape(self._fast * ranks[0] * group_size, self._fast, self._fast)
        if data.max_tokens_per_micro_batch is None:  # a callback may schedule accumulate_grad_batches
            accumulate = self._trainer.accumulate_grad_batches
            shape = iteration_shape(data.rollout_batch_size, group_size, data.micro_batch_size, accumulate, *ranks)
        else:
            shape = capped_iteration_shape(data.rollout_batch_size, group_size, data.updates_per_iteration, *ranks)
        return shape.repeated(self._epochs)

    def check(self) -> None:
        """Raise ValueError if the sizes do not divide, or an update has not so many whole groups as it needs."""
        shape = self.shape
        if self._whole_groups:
            check_whole_groups(shape, self.group_size, self._mesh.world_size, self._mesh.forward_group_size)

    def plan(self, summary: IterationSummary, iteration: int = 0) -> tuple[IterationPlan, int]:
        """Plan an iteration; also returns the micro-batches of all ranks whose losses an optimizer step averages.

        ``iteration`` is its number, by which later epochs are shuffled.
        """
        mesh, per_rank = self._mesh, self._data.max_tokens_per_micro_batch
        plan_rows = partial(
            plan_iteration,
            summary,
            self.shape,
            mesh.world_size,
            ranks_per_forward=mesh.forward_group_size,
            whole_groups=self._whole_groups,
            seed=getattr(self._data, "seed", 0),
            iteration=iteration,
        )
        if per_rank is None:
            return plan_rows(), self._trainer.accumulate_grad_batches * mesh.world_size
        if self._trainer.is_global_zero:
            self._warn(summary, per_rank, mesh.sequence)
        plan = plan_rows(max_tokens=per_rank * mesh.sequence, packed=self._learner.packs_sequences)
        return plan, plan.accumulate * mesh.world_size

    def _warn(self, summary: IterationSummary, per_rank: int, parts: int) -> None:
        longest = int(summary.lengths.max())
        if longest > per_rank * parts and not self._warned:
            self._warned = True
            log.warning(
                "a sequence of %d tokens is longer than max_tokens_per_micro_batch=%d%s and cannot be divided%s: it is "
                "a micro-batch of its own, which needs more memory. Later ones are not reported. Raise "
                "max_tokens_per_micro_batch, or limit SamplingSpec(max_new_tokens=...) and max_prompt_length",
                longest,
                per_rank,
                f" * sequence_parallel_size {parts}" if parts > 1 else "",
                " further" if parts > 1 else "",
            )


class MicroBatches(Sequence[Experience]):
    """This rank's micro-batches of an iteration, in training order; each is selected when it is asked for.

    Until then rows are kept without padding. Making it is a collective: ``counts`` (3, updates) are the trained tokens,
    the sequences that have some, and all sequences of each optimizer step on all ranks. ``averaged`` micro-batches on
    all ranks are averaged in an optimizer step.
    """

    def __init__(self, experience: Experience, planned: Sequence[MicroBatch], averaged: int, *, group: Any) -> None:
        self.rows = JaggedRows(experience)
        """All rows of this rank."""
        self._planned = planned
        self._averaged = averaged
        place = {row: number for number, row in enumerate(experience.own_rows.tolist())}
        self._places = [[place[row] for row in each.rows] for each in planned]
        trained, updates = experience.action_mask, 1 + max(each.update for each in planned)
        sizes = torch.stack([trained.sum(-1), trained.any(-1), torch.ones_like(trained[:, 0])]).double()
        self.counts = torch.zeros(3, updates, dtype=torch.float64)
        for each, places in zip(planned, self._places, strict=True):
            if each.trained:
                self.counts[:, each.update] += sizes[:, places].sum(-1)
        all_reduce(self.counts, group=group)

    def __len__(self) -> int:
        return len(self._planned)

    @overload
    def __getitem__(self, number: int) -> Experience: ...

    @overload
    def __getitem__(self, number: slice) -> list[Experience]: ...

    def __getitem__(self, number: int | slice) -> Experience | list[Experience]:
        """The rows of a micro-batch, with the counts of its optimizer step."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        update = self._planned[number].update
        batch = self.rows.select(self._places[number])
        if not len(batch):  # the rows of this micro-batch are those of other ranks
            batch = batch.placeholder()
        elif not self._planned[number].trained:
            batch = dataclasses.replace(batch, action_mask=torch.zeros_like(batch.action_mask))
        tokens, sequences, rows = self.counts[:, update].tolist()
        return dataclasses.replace(
            batch,
            # The first update's old log-probs are the policy's own.
            old_logprobs=None if update == 0 else batch.old_logprobs,
            step_tokens=tokens,
            step_sequences=sequences,
            step_rows=rows,
            step_micro_batches=self._averaged,
            rows=None,
            iteration=None,
        )
