"""``StreamLoader``: supervised data of unknown length, one optimizer step at a time.

Every rank reads the whole stream and takes its share of each ``micro_batch_size * accumulate * world_size`` examples:
exact totals without communication, and the same steps on any number of ranks. Ranks that compute their forward passes
together (``ranks_per_forward``) share micro-batches, as in :mod:`rlhfkit.data.loaders.steps`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from rlhfkit.data.batch import StepTotals
from rlhfkit.data.loaders.steps import WITHOUT_MESH, StepBatch, check_ranks_per_forward, used_batches
from rlhfkit.data.packing import deal_to_members, split_by_tokens
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

B = TypeVar("B", bound=StepBatch)


class SizedExample(Protocol):
    """An example, pair or judged answer."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass computes for it."""
        ...

    @property
    def targets(self) -> int:
        """Tokens, or steps, that are learned."""
        ...


Stream = Iterator[tuple[Any, SizedExample]]
"""Endless examples, each with the position after it: plain values at which the stream can be opened again."""


class StreamLoader(Generic[B]):
    """A sized, resumable loader over a stream. An epoch is a number of steps; the next one continues after it.

    Example::

        loader = StreamLoader(open_stream, collate_tokens, steps_per_epoch=1000, micro_batch_size=8)
    """

    def __init__(
        self,
        open_stream: Callable[[Any], Stream],
        collate: Callable[[Sequence[Any], StepTotals], B],
        *,
        steps_per_epoch: int,
        micro_batch_size: int,
        accumulate: int = 1,
        rank: int = 0,
        world_size: int = 1,
        ranks_per_forward: int = 1,
        limit_batches: int | float = 1.0,
        fingerprint: str = "",
        on_last_batch: Callable[[Any], None] = lambda place: None,
    ) -> None:
        """Plan the steps; nothing is read yet.

        Args:
            open_stream: Opens the stream at a position; ``None``: at its beginning.
            collate: Makes a batch of examples and the totals of their step.
            steps_per_epoch: Optimizer steps per epoch.
            micro_batch_size: Examples per micro-batch on average.
            accumulate: Micro-batches per step and rank (``Trainer(accumulate_grad_batches)``).
            rank: This rank.
            world_size: Ranks.
            ranks_per_forward: Ranks that share a micro-batch, neighbours (``Mesh.forward_group_size``).
            limit_batches: Micro-batches, or share of them, that an epoch has (``Trainer(limit_train_batches)``).
            fingerprint: Digest of what positions in the stream depend on.
            on_last_batch: Called before the last micro-batch of each step with the position after the step.

        Raises:
            ValueError: If a size is out of range, or the ranks do not divide.
        """
        self._sizes = {
            "steps_per_epoch": steps_per_epoch,
            "micro_batch_size": micro_batch_size,
            "accumulate": accumulate,
            "world_size": world_size,
            "ranks_per_forward": ranks_per_forward,
        }
        for name, size in self._sizes.items():
            check_integer(name, size, minimum=1)
        check_integer("rank", rank, minimum=0, maximum=world_size - 1)
        check_ranks_per_forward(ranks_per_forward, world_size)
        check_number("limit_batches", limit_batches, minimum=0)
        self.open_stream = open_stream
        self.collate = collate
        self.on_last_batch = on_last_batch
        self.steps_per_epoch = steps_per_epoch
        self.accumulate = accumulate
        self.rank = rank
        self.world_size = world_size
        self.ranks_per_forward = ranks_per_forward
        self.limit_batches = limit_batches
        self.fingerprint = fingerprint
        self.window = micro_batch_size * accumulate * (world_size // ranks_per_forward)
        self._stream: Stream | None = None
        self._before: Any = None  # position before the current step
        self._behind: Any = None  # position after it
        self._position = 0  # batches yielded in the current epoch
        self._start = 0  # batches to skip: trained on before the run was resumed

    def __len__(self) -> int:
        """Micro-batches per epoch, the same on every rank."""
        return self.steps_per_epoch * self.accumulate

    def __iter__(self) -> Iterator[B]:
        """This rank's micro-batches of the next epoch, or the rest of a restored one."""
        start, self._start = self._start, 0
        self._position = start // self.accumulate * self.accumulate
        for _ in range(self._position // self.accumulate, self.steps_per_epoch):
            for batch in self._next_step():
                self._position += 1  # before the yield: code after the last yield never runs
                if self._position > start:
                    if self._position % self.accumulate == 0:
                        self.on_last_batch(self._behind)
                    yield batch

    def _next_step(self) -> list[B]:
        """This rank's micro-batches of the next window."""
        if self._stream is None:
            self._stream = self.open_stream(self._behind)
        self._before = self._behind
        examples: list[Any] = []
        for _ in range(self.window):
            self._behind, example = next(self._stream)
            examples.append(example)
        targets = [example.targets for example in examples]
        totals = StepTotals(
            float(sum(targets)), float(sum(count > 0 for count in targets)), self.accumulate * self.world_size
        )
        lengths = [example.num_tokens for example in examples]
        bins = split_by_tokens(lengths, self.accumulate * (self.world_size // self.ranks_per_forward))
        dealt = deal_to_members(bins, lengths, world_size=self.world_size, ranks_per_forward=self.ranks_per_forward)
        return self.make_batches(dealt[self.rank :: self.world_size], examples, totals)

    def make_batches(self, shares: Sequence[Sequence[int]], examples: Sequence[Any], totals: StepTotals) -> list[B]:
        """This rank's micro-batches of a step, from the indices of their examples."""
        return [self._batch(rows, examples, totals) for rows in shares]

    def _batch(self, rows: Sequence[int], examples: Sequence[Any], totals: StepTotals) -> B:
        """A micro-batch; two tokens without targets for a rank that has no rows of the one it shares."""
        if rows:
            return self.collate([examples[index] for index in rows], totals)
        shortest = min(examples, key=lambda example: example.num_tokens)
        return self.collate([shortest], totals).without_targets().first_tokens(2)

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream and in the epoch."""
        return self.state_dict_before(0)

    def state_dict_before(self, batches: int) -> dict[str, Any]:
        """The state ``batches`` batches of the last step ago, to repeat those that no optimizer step has used."""
        used = used_batches(len(self), self.limit_batches)
        inside = batches > 0 or (self._position < used and self._position % self.accumulate != 0)
        return {
            "place": self._before if inside else self._behind,
            "position": (self._position - batches) % used,
            "fingerprint": self.fingerprint,
            **self._sizes,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after what was already trained on; in a new pass, with a warning, if the stream is another one.

        Between two steps, other sizes of a micro-batch and numbers of ranks change nothing but the next steps.

        Raises:
            ValueError: If the saved run was inside an epoch of another length, or inside a step of another size.
        """
        state = {**WITHOUT_MESH, "fingerprint": self.fingerprint, **state}
        changed = [name for name, size in self._sizes.items() if size != state[name]]
        between_steps = state["position"] % state["accumulate"] == 0
        fixed = [name for name in changed if name in ("steps_per_epoch", "accumulate") or not between_steps]
        if fixed and state["position"]:
            differences = ", ".join(f"{name} was {state[name]} and is {self._sizes[name]}" for name in fixed)
            raise ValueError(
                f"cannot continue inside an epoch whose steps have changed ({differences}): resume with the same "
                "values, or from a checkpoint of the end of an epoch"
            )
        place = state["place"]
        if state["fingerprint"] != self.fingerprint:
            log.warning(
                "The data, its weights, seed or shuffle_block are not those that the checkpoint was saved with; the "
                "order cannot be continued, so a new pass begins"
            )
            place = None
        self._stream = None
        self._before = self._behind = place
        self._start = self._position = state["position"]
