"""``StepLoader``: supervised data, one optimizer step at a time, from a table of examples or from a stream.

A step takes ``micro_batch_size * accumulate * world_size`` examples, the next of a permutation of (seed, epoch) or of
the stream, and splits them **globally** into micro-batches of nearly equal tokens, which carry the counts of the step:
its gradient does not depend on the split. Counts need no communication, because every rank knows all lengths. With a
token budget, the examples of a table are packed once (best-fit-decreasing) into micro-batches, since Lightning asks for
their number before the first epoch; a step takes ``accumulate * world_size`` of a permutation of them.

In a short last step ``step_micro_batches`` stays ``accumulate * world_size``, by which Lightning divides, and a rank
without examples gets a batch without targets, since every rank must yield equally many.

Ranks that compute their forward passes together (``ranks_per_forward``) share micro-batches: a step takes
``micro_batch_size * accumulate * world_size / ranks_per_forward`` examples, and each of these ranks gets some of the
examples of a micro-batch, or two tokens without targets.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from rlhfkit.data.batch import StepTotals, TokenBatch
from rlhfkit.data.packing import best_fit_decreasing, deal_to_members, permutation, split_by_tokens
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)


B = TypeVar("B", bound=TokenBatch)
E = TypeVar("E")
F = TypeVar("F", bound=TokenBatch)


class MapDataset(Protocol):
    """A map-style data set, or a value of each of its examples."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One example, or its value."""
        ...


class TokenizedDataset(MapDataset, Protocol):
    """A map-style data set with the sizes of its examples."""

    lengths: list[int]
    """Tokens of each example."""
    targets: list[int]
    """Trained tokens of each example."""


class ExampleTable(Generic[E]):
    """Examples of one sequence or several, with values beside them.

    Example::

        pairs = ExampleTable(answers, PreferenceExample, each=2, margin=[0.5, 2.0])
        pairs.values["ref_logprobs"] = torch.tensor([[-3.0, -4.0], [-2.5, -6.0]])
    """

    def __init__(
        self, answers: TokenizedDataset, example: Callable[..., E], *, each: int = 1, **values: MapDataset | None
    ) -> None:
        """Combine sequences and values to N examples.

        Args:
            answers: N times ``each`` sequences, those of an example in turn.
            example: Makes an example of its sequences and values.
            each: Sequences of an example.
            **values: N values by the name of the argument of ``example``; ``None``: the argument keeps its default.

        Raises:
            ValueError: If the numbers do not fit.
        """
        self.answers = answers
        self.example = example
        self.each = each
        self.values: dict[str, Any] = {name: given for name, given in values.items() if given is not None}
        """Values of each example; more can be added. Of a tensor, an example gets plain numbers."""
        lengths = answers.lengths
        self.lengths = lengths if each == 1 else [sum(lengths[i : i + each]) for i in range(0, len(lengths), each)]
        """Tokens of each example, all its sequences."""
        self.targets = answers.targets[::each]
        """Trained tokens of the first sequence of each example."""
        wrong = {name: len(given) for name, given in self.values.items() if len(given) != len(self)}
        if len(lengths) % each or wrong:
            raise ValueError(
                f"an example has {each} of the answers, of which there are {len(lengths)}, and each of its values; "
                f"got {', '.join(f'{count} of {name}' for name, count in wrong.items()) or 'one left over'}"
            )

    def __len__(self) -> int:
        """Number of examples N."""
        return len(self.targets)

    def __getitem__(self, index: int) -> E:
        """One example."""
        own = [self.answers[index * self.each + number] for number in range(self.each)]
        chosen = {name: given[index] for name, given in self.values.items()}
        plain = {name: value.tolist() for name, value in chosen.items() if isinstance(self.values[name], Tensor)}
        return self.example(*own, **chosen | plain)


class SizedExample(Protocol):
    """An example, pair or judged answer."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass computes for it."""
        ...

    @property
    def targets(self) -> int:
        """Tokens, or reasoning steps, that are learned."""
        ...


class ExampleStream(Protocol):
    """Examples without end."""

    @property
    def fingerprint(self) -> str:
        """Digest of what positions in the stream depend on."""
        ...

    def open(self, position: Any = None) -> Iterator[tuple[Any, SizedExample]]:
        """Yield examples with the position after each, plain values, from a position on; ``None``: the beginning."""
        ...


@dataclass(frozen=True)
class StepSizes:
    """What the division of examples into steps depends on."""

    micro_batch_size: int | None
    max_tokens_per_micro_batch: int | None
    accumulate: int
    world_size: int
    ranks_per_forward: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        if (self.micro_batch_size is None) == (self.max_tokens_per_micro_batch is None):
            raise ValueError(
                "give the size of a micro-batch as micro_batch_size or as max_tokens_per_micro_batch, got "
                f"micro_batch_size={self.micro_batch_size!r} and "
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch!r}"
            )
        for name, size in asdict(self).items():
            check_integer(name, size, minimum=1, optional=name in ("micro_batch_size", "max_tokens_per_micro_batch"))
        if self.world_size % self.ranks_per_forward:
            raise ValueError(
                f"ranks_per_forward must divide world_size {self.world_size}, got {self.ranks_per_forward}"
            )

    @property
    def at_once(self) -> int:
        """Micro-batches that are computed at the same time, by all ranks."""
        return self.world_size // self.ranks_per_forward

    @property
    def per_micro_batch(self) -> int:
        """Units in a micro-batch: examples, or 1 where micro-batches fill a token budget."""
        return self.micro_batch_size or 1

    @property
    def global_batch_size(self) -> int:
        """Units per optimizer step, all ranks together."""
        return self.per_micro_batch * self.accumulate * self.at_once

    def totals(self, targets: Sequence[int], averaged: int) -> StepTotals:
        """Totals of examples with these targets, averaged over that many micro-batches of every rank."""
        return StepTotals(float(sum(targets)), float(sum(n > 0 for n in targets)), averaged * self.world_size)


class Step(NamedTuple):
    """The examples of an optimizer step, and who computes them."""

    examples: MapDataset
    """Whose indices the rows of micro-batches are."""
    totals: StepTotals
    micro_batches: list[list[int]]
    """Rows of the micro-batches of all ranks, some of them empty; rank r of R takes r, r + R, r + 2R, ..."""
    lengths: Sequence[int]
    """Tokens of each of ``examples``."""

    @property
    def shortest(self) -> int:
        """The cheapest row of the step, for a forward pass without targets."""
        return min((row for rows in self.micro_batches for row in rows), key=lambda row: self.lengths[row])


def batches_used(batches: int, limit: int | float) -> int:
    """Micro-batches of an epoch of so many, at least 1, under ``Trainer(limit_train_batches)`` and its like."""
    return max(1, min(batches, limit) if isinstance(limit, int) else int(batches * limit))


class TableSteps:
    """The steps of epochs over a table of examples."""

    def __init__(
        self,
        examples: TokenizedDataset,
        sizes: StepSizes,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        normalize_over_epoch: bool,
        limit_batches: int | float,
    ) -> None:
        self.examples = examples
        self.lengths = examples.lengths
        self.targets = examples.targets
        self.sizes = sizes
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.normalize_over_epoch = normalize_over_epoch
        self.limit_batches = limit_batches
        self._bins: list[list[int]] | None = None
        if sizes.max_tokens_per_micro_batch is not None:
            ties = permutation(len(self.lengths), seed=seed, number=-1) if shuffle else None
            self._bins = best_fit_decreasing(self.lengths, sizes.max_tokens_per_micro_batch, ties)
        if len(self) == 0:
            full = " and drop_last leaves out what does not fill one" if drop_last else ""
            raise ValueError(
                f"{len(self.lengths)} examples, and a step takes {sizes.global_batch_size}{full}: there is nothing to "
                "train on"
            )

    @property
    def units(self) -> int:
        """Length of the permutation of an epoch: examples, or micro-batches that fill a token budget."""
        return len(self.lengths) if self._bins is None else len(self._bins)

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        full, rest = divmod(self.units, self.sizes.global_batch_size)
        return full * self.sizes.accumulate + (0 if self.drop_last else self._micro_batches(rest))

    def _micro_batches(self, units: int) -> int:
        """Micro-batches per rank in a step of that many units."""
        return ceil(units / (self.sizes.per_micro_batch * self.sizes.at_once))

    def order(self, epoch: int) -> list[int]:
        """The units in the order of an epoch (from 0), the same on every rank."""
        if not self.shuffle:
            return list(range(self.units))
        return permutation(self.units, seed=self.seed, number=epoch)

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps of an epoch (from 0), from the one of micro-batch ``start`` on."""
        order, size = self.order(epoch), self.sizes.global_batch_size
        if self.drop_last:
            order = order[: len(order) // size * size]
        epoch_totals = None
        if self.normalize_over_epoch:
            used = batches_used(len(self), self.limit_batches)
            epoch_totals = self._totals(order[: ceil(used / self.sizes.accumulate) * size], used)
        for first in range(start // self.sizes.accumulate * size, len(order), size):
            units = order[first : first + size]
            totals = epoch_totals or self._totals(units, self.sizes.accumulate)
            yield Step(self.examples, totals, self._split(units), self.lengths)

    def _totals(self, units: Sequence[int], averaged: int) -> StepTotals:
        rows = units if self._bins is None else [row for unit in units for row in self._bins[unit]]
        return self.sizes.totals([self.targets[row] for row in rows], averaged)

    def _split(self, units: Sequence[int]) -> list[list[int]]:
        """The micro-batches of a step for all ranks, fullest first, with empty ones where there are too few."""
        wanted = self._micro_batches(len(units)) * self.sizes.at_once
        if self._bins is not None:
            filled = [self._bins[unit] for unit in units]
            filled.sort(key=lambda rows: (-sum(self.lengths[row] for row in rows), rows[0]))
        else:
            rows = sorted(units)
            bins = split_by_tokens([self.lengths[row] for row in rows], min(wanted, len(rows)))
            filled = [[rows[index] for index in chosen] for chosen in bins]
        filled += [[] for _ in range(wanted - len(filled))]
        sizes = self.sizes
        return deal_to_members(
            filled, self.lengths, world_size=sizes.world_size, ranks_per_forward=sizes.ranks_per_forward
        )

    def state_dict(self, *, inside: bool) -> dict[str, Any]:
        """What the order of the data depends on."""
        return {"examples": len(self.lengths), **asdict(self.sizes), "seed": self.seed}

    def changed(self, state: Mapping[str, Any]) -> list[str]:
        """Entries of a saved state with which an epoch that was begun cannot be continued."""
        return [name for name, value in self.state_dict(inside=False).items() if value != state.get(name)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore: steps are a function of the epoch."""


class StreamSteps:
    """The steps of epochs over a stream: each epoch is a number of steps, and the next one continues after it."""

    def __init__(
        self,
        stream: ExampleStream,
        steps_per_epoch: int,
        sizes: StepSizes,
        complete: Callable[[list[Any]], list[Any]],
    ) -> None:
        check_integer("steps_per_epoch", steps_per_epoch, minimum=1)
        self.stream = stream
        self.steps_per_epoch = steps_per_epoch
        self.sizes = sizes
        self._complete = complete
        self._opened: Iterator[tuple[Any, SizedExample]] | None = None
        self._before: Any = None  # position before the current step
        self.behind: Any = None
        """Position after the current step."""

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        return self.steps_per_epoch * self.sizes.accumulate

    def steps(self, epoch: int, start: int = 0) -> Iterator[Step]:
        """Yield the next steps, for an epoch of which those before micro-batch ``start`` are done."""
        for _ in range(start // self.sizes.accumulate, self.steps_per_epoch):
            yield self._next_step()

    def _next_step(self) -> Step:
        if self._opened is None:
            self._opened = self.stream.open(self.behind)
        self._before, sizes = self.behind, self.sizes
        examples: list[Any] = []
        for _ in range(sizes.global_batch_size):
            self.behind, example = next(self._opened)
            examples.append(example)
        lengths = [example.num_tokens for example in examples]
        totals = sizes.totals([example.targets for example in examples], sizes.accumulate)
        bins = split_by_tokens(lengths, sizes.accumulate * sizes.at_once)
        dealt = deal_to_members(bins, lengths, world_size=sizes.world_size, ranks_per_forward=sizes.ranks_per_forward)
        return Step(self._complete(examples), totals, dealt, lengths)

    def state_dict(self, *, inside: bool) -> dict[str, Any]:
        """Position in front of the next step; of the current one if ``inside`` of it."""
        return {
            "place": self._before if inside else self.behind,
            "fingerprint": self.stream.fingerprint,
            "steps_per_epoch": self.steps_per_epoch,
            **asdict(self.sizes),
        }

    def changed(self, state: Mapping[str, Any]) -> list[str]:
        """Entries of a saved state with which its epoch cannot be continued.

        Between two steps, other sizes of a micro-batch and numbers of ranks change nothing but the next steps.
        """
        sizes = {"steps_per_epoch": self.steps_per_epoch, **asdict(self.sizes)}
        fixed = ["steps_per_epoch", "accumulate"] if state["position"] % state["accumulate"] == 0 else list(sizes)
        return [name for name in fixed if sizes[name] != state[name]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved position; in a new pass, with a warning, if the stream is another one."""
        place = state["place"]
        if state["fingerprint"] != self.stream.fingerprint:
            log.warning(
                "The data, its weights, seed or shuffle_buffer_size are not those that the checkpoint was saved with; "
                "the order cannot be continued, so a new pass begins"
            )
            place = None
        self._opened = None
        self._before = self.behind = place


class StepLoader(Generic[B]):
    """A sized, resumable loader whose steps are the same on any number of ranks.

    Example::

        loader = StepLoader(examples, collate_tokens, micro_batch_size=8)
        loader = StepLoader(stream, collate_tokens, steps_per_epoch=1000, micro_batch_size=8)
    """

    def __init__(
        self,
        examples: TokenizedDataset | ExampleStream,
        collate: Callable[[Sequence[Any], StepTotals], B],
        *,
        steps_per_epoch: int | None = None,
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
        normalize_over_epoch: bool = False,
        limit_batches: int | float = 1.0,
        on_last_batch: Callable[[Any], None] = lambda place: None,
    ) -> None:
        """Plan the steps; no example is read yet.

        Args:
            examples: Map-style data with the tokens of each example, to balance micro-batches, and its trained tokens,
                to normalise the loss; or with ``steps_per_epoch`` a stream.
            collate: Makes a batch of examples and the totals of their step.
            steps_per_epoch: Optimizer steps per epoch of a stream.
            micro_batch_size: Examples per micro-batch on average; or
            max_tokens_per_micro_batch: Tokens per micro-batch at most; not for a stream.
            accumulate: Micro-batches per step and rank (``Trainer(accumulate_grad_batches)``).
            rank: This rank.
            world_size: Ranks.
            ranks_per_forward: Ranks that share a micro-batch, neighbours (``Mesh.forward_group_size``).
            shuffle: A new permutation in each epoch; in order when false. A stream has an order of its own.
            seed: Of the permutations.
            epoch: Returns the epoch, e.g. ``lambda: trainer.current_epoch``; ``None``: the one of :meth:`set_epoch`.
            drop_last: Skip a step that is not full.
            normalize_over_epoch: Totals of the epoch instead of the step, so the plain mean over batches is exact
                (validation).
            limit_batches: Micro-batches, or share of them, that an epoch has (``Trainer(limit_train_batches)``, of
                validation ``limit_val_batches``).
            on_last_batch: Called before the last micro-batch of each step of a stream, with the position after it.

        Raises:
            ValueError: If sizes are out of range or do not divide, both or none of the two sizes of a micro-batch are
                given, an example is longer than the token budget, or there is nothing to train on.
        """
        sizes = StepSizes(micro_batch_size, max_tokens_per_micro_batch, accumulate, world_size, ranks_per_forward)
        check_integer("rank", rank, minimum=0, maximum=world_size - 1)
        check_integer("seed", seed)
        check_number("limit_batches", limit_batches, minimum=0)
        self.collate = collate
        self.sizes = sizes
        self.rank = rank
        self.seed = seed
        self.limit_batches = limit_batches
        self.schedule: TableSteps | StreamSteps
        """Which examples each step takes."""
        if steps_per_epoch is None:
            self.schedule = TableSteps(
                cast(TokenizedDataset, examples),
                sizes,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
                normalize_over_epoch=normalize_over_epoch,
                limit_batches=limit_batches,
            )
        else:
            self.schedule = StreamSteps(cast(ExampleStream, examples), steps_per_epoch, sizes, self.complete)
        self._on_last_batch = on_last_batch
        self._epoch = epoch
        self._set_epoch = 0
        self._position = 0  # batches yielded in the current epoch
        self._start = 0  # batches to skip: trained on before the run was resumed

    @property
    def examples(self) -> TokenizedDataset | None:
        """The table of examples; ``None``: the examples are a stream. Can be set to one of equally many."""
        return self.schedule.examples if isinstance(self.schedule, TableSteps) else None

    @examples.setter
    def examples(self, examples: TokenizedDataset) -> None:
        cast(TableSteps, self.schedule).examples = examples

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        return len(self.schedule)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, where no ``epoch`` callable was given."""
        self._set_epoch = epoch

    def complete(self, examples: list[Any]) -> list[Any]:
        """Add to the examples of a step of a stream what depends on all of them; override it."""
        return examples

    def __iter__(self) -> Iterator[B]:
        """This rank's micro-batches of the epoch, or the rest of a restored one."""
        epoch = self._set_epoch if self._epoch is None else self._epoch()
        start, self._start = self._start, 0
        self._position = start // self.sizes.accumulate * self.sizes.accumulate
        for step in self.schedule.steps(epoch, start):
            for number in range(len(step.micro_batches) // self.sizes.world_size):
                self._position += 1  # before the yield: code after the last yield never runs
                if self._position > start:
                    if isinstance(self.schedule, StreamSteps) and self._position % self.sizes.accumulate == 0:
                        self._on_last_batch(self.schedule.behind)
                    yield self.batch_of(step, number)

    def batch_of(self, step: Step, number: int) -> B:
        """This rank's micro-batch ``number`` of a step."""
        return self.joined(step, number, lambda examples: self.collate(examples, step.totals))

    def joined(self, step: Step, number: int, collate: Callable[[list[Any]], F]) -> F:
        """A batch of the examples of this rank's micro-batch ``number`` of a step.

        A rank without examples gets one without targets, of two tokens where it is joined with those of other ranks.
        """
        rows = step.micro_batches[self.rank :: self.sizes.world_size][number]
        if rows:
            return collate([step.examples[row] for row in rows])
        batch = collate([step.examples[step.shortest]]).without_targets()
        return batch if self.sizes.ranks_per_forward == 1 else batch.first_tokens(2)

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch and in a stream, and the sizes it depends on."""
        return self.state_dict_before(0)

    def state_dict_before(self, batches: int) -> dict[str, Any]:
        """The state ``batches`` batches of the last step ago, to repeat those that no optimizer step has used."""
        used = batches_used(len(self), self.limit_batches)
        inside = batches > 0 or (self._position < used and self._position % self.sizes.accumulate != 0)
        return {"position": (self._position - batches) % used, **self.schedule.state_dict(inside=inside)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Skip what was already trained on when the next epoch starts.

        Raises:
            ValueError: If the saved run was inside an epoch whose steps would be others now.
        """
        changed = self.schedule.changed(state)
        if changed and state["position"]:
            own = self.schedule.state_dict(inside=False)
            differences = ", ".join(f"{name} was {state.get(name)} and is {own[name]}" for name in changed)
            raise ValueError(
                f"cannot continue inside an epoch whose steps have changed ({differences}): resume with the same "
                "values, or from a checkpoint of the end of an epoch"
            )
        self.schedule.load_state_dict(state)
        self._start = self._position = state["position"]
