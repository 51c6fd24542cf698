"""``StepLoader``: supervised data, one optimizer step at a time.

A step takes the next ``micro_batch_size * accumulate * world_size`` examples of a permutation of (seed, epoch) and
splits them **globally** into micro-batches of nearly equal tokens, which carry the counts of the step: its gradient
does not depend on the split. With a token budget, examples are packed once (best-fit-decreasing) into micro-batches,
since Lightning asks for their number before the first epoch; a step takes ``accumulate * world_size`` of a permutation
of them.

In a short last window ``step_micro_batches`` stays ``accumulate * world_size``, by which Lightning divides, and a rank
without examples gets a batch without targets, since every rank must yield equally many.

Ranks that compute their forward passes together (``ranks_per_forward``) share micro-batches: a step takes
``micro_batch_size * accumulate * world_size / ranks_per_forward`` examples, and each of these ranks gets some of the
examples of a micro-batch, or two tokens without targets.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Generic, Protocol, Self, TypeVar

from rlhfkit.data.batch import StepTotals
from rlhfkit.data.packing import best_fit_decreasing, deal_to_members, permutation, split_by_tokens
from rlhfkit.validation import check_integer, check_number

WITHOUT_MESH = {"ranks_per_forward": 1}
"""What the states of loaders had no entry for before there was a mesh."""


def check_ranks_per_forward(ranks_per_forward: int, world_size: int) -> None:
    """Raise ValueError unless the ranks can be divided into groups of that many."""
    check_integer("ranks_per_forward", ranks_per_forward, minimum=1)
    if world_size % ranks_per_forward:
        raise ValueError(f"ranks_per_forward must divide world_size {world_size}, got {ranks_per_forward}")


def used_batches(length: int, limit: int | float) -> int:
    """Micro-batches of an epoch of ``length`` that a ``Trainer(limit_train_batches=limit)`` uses, at least 1."""
    return max(1, min(length, limit) if isinstance(limit, int) else int(length * limit))


class StepBatch(Protocol):
    """A batch that can be turned into one without targets."""

    def without_targets(self) -> Self:
        """The same batch with nothing to train."""
        ...

    def first_tokens(self, length: int) -> Self:
        """The same batch with at most that many tokens of each row."""
        ...


class MapDataset(Protocol):
    """A map-style data set."""

    def __getitem__(self, index: int, /) -> Any:
        """One example."""
        ...


class TokenizedDataset(MapDataset, Protocol):
    """A map-style data set with the sizes of its examples."""

    lengths: list[int]
    """Tokens of each example."""
    targets: list[int]
    """Trained tokens of each example."""


B = TypeVar("B", bound=StepBatch)
F = TypeVar("F", bound=StepBatch)


class StepLoader(Generic[B]):
    """A sized, resumable loader whose steps are the same on any number of ranks.

    Example::

        loader = StepLoader(examples, collate_tokens, lengths=lengths, targets=targets, micro_batch_size=8)
    """

    def __init__(
        self,
        examples: MapDataset,
        collate: Callable[[Sequence[Any], StepTotals], B],
        *,
        lengths: Sequence[int],
        targets: Sequence[int],
        micro_batch_size: int | None = None,
        max_tokens_per_micro_batch: int | None = None,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
        ranks_per_forward: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        epoch: Callable[[], int] | None = None,
        drop_last: bool = False,
        whole_epoch: bool = False,
        limit_batches: int | float = 1.0,
    ) -> None:
        """Plan the steps; no example is read yet.

        Args:
            examples: Map-style data.
            collate: Makes a batch of examples and the totals of their step.
            lengths: Tokens of each example, to balance micro-batches.
            targets: Trained tokens of each example, to normalise the loss.
            micro_batch_size: Examples per micro-batch on average; or
            max_tokens_per_micro_batch: Tokens per micro-batch at most.
            accumulate: Micro-batches per step and rank (``Trainer(accumulate_grad_batches)``).
            rank: This rank.
            world_size: Ranks.
            ranks_per_forward: Ranks that share a micro-batch, neighbours (``Mesh.forward_group_size``).
            shuffle: A new permutation in each epoch; in order when false.
            seed: Of the permutations.
            epoch: Returns the epoch, e.g. ``lambda: trainer.current_epoch``; ``None``: the one of :meth:`set_epoch`.
            drop_last: Skip a window that is not full.
            whole_epoch: Totals of the epoch instead of the step, so the plain mean over batches is exact (validation).
            limit_batches: Micro-batches, or share of them, that an epoch has (``Trainer(limit_train_batches)``).

        Raises:
            ValueError: If sizes are out of range or do not divide, both or none of the two sizes of a micro-batch are
                given, an example is longer than the token budget, or there is nothing to train on.
        """
        if (micro_batch_size is None) == (max_tokens_per_micro_batch is None):
            raise ValueError(
                "give the size of a micro-batch as micro_batch_size or as max_tokens_per_micro_batch, got "
                f"{micro_batch_size=} and {max_tokens_per_micro_batch=}"
            )
        for name, size in {
            "micro_batch_size": micro_batch_size,
            "max_tokens_per_micro_batch": max_tokens_per_micro_batch,
            "accumulate": accumulate,
            "world_size": world_size,
        }.items():
            check_integer(name, size, minimum=1, optional=name in ("micro_batch_size", "max_tokens_per_micro_batch"))
        check_integer("rank", rank, minimum=0, maximum=world_size - 1)
        check_ranks_per_forward(ranks_per_forward, world_size)
        check_integer("seed", seed)
        check_number("limit_batches", limit_batches, minimum=0)
        if len(lengths) != len(targets):
            raise ValueError(f"lengths and targets are per example, got {len(lengths)} and {len(targets)}")
        self.examples = examples
        self.collate = collate
        self.lengths = lengths
        self.targets = targets
        self.micro_batch_size = micro_batch_size
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.accumulate = accumulate
        self.rank = rank
        self.world_size = world_size
        self.ranks_per_forward = ranks_per_forward
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.whole_epoch = whole_epoch
        self.limit_batches = limit_batches
        self._epoch = epoch
        self._set_epoch = 0
        self._position = 0  # batches yielded in the current epoch
        self._start = 0  # batches to skip: trained on before the run was resumed
        self._bins: list[list[int]] | None = None
        if max_tokens_per_micro_batch is not None:
            ties = permutation(len(lengths), seed=seed, number=-1) if shuffle else None
            self._bins = best_fit_decreasing(lengths, max_tokens_per_micro_batch, ties)
        if len(self) == 0:
            full = " and drop_last leaves out what does not fill one" if drop_last else ""
            raise ValueError(
                f"{len(lengths)} examples, and a step takes {self.window}{full}: there is nothing to train on"
            )

    @property
    def units(self) -> int:
        """Length of the permutation of an epoch: examples, or micro-batches that fill a token budget."""
        return len(self.lengths) if self._bins is None else len(self._bins)

    @property
    def window(self) -> int:
        """Units per optimizer step, all ranks together."""
        return (self.micro_batch_size or 1) * self.accumulate * self._at_once

    @property
    def _at_once(self) -> int:
        """Micro-batches that are computed at the same time, by all ranks."""
        return self.world_size // self.ranks_per_forward

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        full, rest = divmod(self.units, self.window)
        return full * self.accumulate + (0 if self.drop_last else self._micro_batches(rest))

    def _micro_batches(self, units: int) -> int:
        """Micro-batches per rank in a window of that many units."""
        return ceil(units / ((self.micro_batch_size or 1) * self._at_once))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, where no ``epoch`` callable was given."""
        self._set_epoch = epoch

    def order(self, epoch: int) -> list[int]:
        """The units in the order of an epoch (from 0), the same on every rank."""
        if not self.shuffle:
            return list(range(self.units))
        return permutation(self.units, seed=self.seed, number=epoch)

    def steps(self, epoch: int) -> Iterator[tuple[StepTotals, list[list[int]]]]:
        """Yield the totals of each step of an epoch (from 0) and the micro-batches of all ranks, which may be empty."""
        order = self.order(epoch)
        if self.drop_last:
            order = order[: len(order) // self.window * self.window]
        epoch_totals = self._totals(self._rows(order), len(self)) if self.whole_epoch else None
        for start in range(0, len(order), self.window):
            units = order[start : start + self.window]
            yield epoch_totals or self._totals(self._rows(units), self.accumulate), self._split(units)

    def _rows(self, units: Sequence[int]) -> Sequence[int]:
        return units if self._bins is None else [row for unit in units for row in self._bins[unit]]

    def _split(self, units: Sequence[int]) -> list[list[int]]:
        """The micro-batches of a step for all ranks, fullest first, with empty ones where there are too few."""
        wanted = self._micro_batches(len(units)) * self._at_once
        if self._bins is not None:
            filled = [self._bins[unit] for unit in units]
            filled.sort(key=lambda rows: (-sum(self.lengths[row] for row in rows), rows[0]))
        else:
            rows = sorted(units)
            bins = split_by_tokens([self.lengths[row] for row in rows], min(wanted, len(rows)))
            filled = [[rows[index] for index in chosen] for chosen in bins]
        filled += [[] for _ in range(wanted - len(filled))]
        return deal_to_members(
            filled, self.lengths, world_size=self.world_size, ranks_per_forward=self.ranks_per_forward
        )

    def _totals(self, rows: Sequence[int], averaged: int) -> StepTotals:
        """Totals of these examples, averaged over that many micro-batches of every rank."""
        targets = [self.targets[row] for row in rows]
        return StepTotals(float(sum(targets)), float(sum(n > 0 for n in targets)), averaged * self.world_size)

    def __iter__(self) -> Iterator[B]:
        """This rank's micro-batches of the epoch, or the rest of a restored one."""
        epoch = self._set_epoch if self._epoch is None else self._epoch()
        start, self._start = self._start, 0
        self._position = 0
        for totals, micro_batches in self.steps(epoch):
            for rows in micro_batches[self.rank :: self.world_size]:
                self._position += 1  # before the yield: code after the last yield never runs
                if self._position > start:
                    yield self._batch(rows, totals, micro_batches)

    def _batch(self, rows: list[int], totals: StepTotals, micro_batches: list[list[int]]) -> B:
        if rows:
            return self.collate([self.examples[row] for row in rows], totals)
        return self._filler(self.collate([self.examples[self._shortest(micro_batches)]], totals))

    def _filler(self, batch: F) -> F:
        """A batch for a rank without examples: no targets, and two tokens where it is joined with those of others."""
        batch = batch.without_targets()
        return batch if self.ranks_per_forward == 1 else batch.first_tokens(2)

    def _shortest(self, micro_batches: list[list[int]]) -> int:
        """The cheapest example, for a forward pass without targets."""
        return min((row for rows in micro_batches for row in rows), key=lambda row: self.lengths[row])

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch, and the sizes it depends on."""
        return self.state_dict_before(0)

    def state_dict_before(self, batches: int) -> dict[str, Any]:
        """The state ``batches`` batches ago, to repeat those that no optimizer step has used."""
        return {
            "position": (self._position - batches) % used_batches(len(self), self.limit_batches),
            "examples": len(self.lengths),
            "micro_batch_size": self.micro_batch_size,
            "max_tokens_per_micro_batch": self.max_tokens_per_micro_batch,
            "accumulate": self.accumulate,
            "world_size": self.world_size,
            "ranks_per_forward": self.ranks_per_forward,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Skip what was already trained on when the next epoch starts.

        Raises:
            ValueError: If the order of the data would differ from the saved one.
        """
        own, state = self.state_dict(), {**WITHOUT_MESH, **state}
        changed = [name for name in own if name != "position" and own[name] != state.get(name)]
        if changed and state["position"]:
            differences = ", ".join(f"{name} was {state.get(name)} and is {own[name]}" for name in changed)
            raise ValueError(
                f"cannot continue inside an epoch whose steps have changed ({differences}): resume with the same "
                "values, or from a checkpoint of the end of an epoch"
            )
        self._start = self._position = state["position"]
