"""The endless sequence of shuffled passes over the prompts, and how an iteration draws prompts from it.

Each pass has every row once, no iteration has a row twice, and prompts that were drawn but not used come first in the
next iteration. Drawing does not move the saved cursor; it moves once an iteration was trained on.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Protocol, Self

from rlhfkit.data.packing import permutation
from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.curriculum import MAX_RECENT, Curriculum, PromptPass, PromptStats, RecentGroup

log = logging.getLogger(__name__)


class PromptCursor(NamedTuple):
    """Position of the next prompt in the endless sequence of passes."""

    number: int = 0
    """Passes finished."""
    offset: int = 0
    """Rows of the current pass that were taken or postponed."""
    postponed: tuple[int, ...] = ()
    """Rows before the offset that come first in the next batch: requeued, or already in the last batch."""
    rows: Sequence[int] | None = None
    """The current pass as a curriculum has ordered it; ``None`` without a curriculum."""
    history: Mapping[int, PromptStats] | None = None
    """Statistics by row for a curriculum, of the prompts that were sampled."""
    recent: tuple[RecentGroup, ...] = ()
    """The latest groups for a curriculum, the newest last."""

    def new_pass(self) -> Self:
        """The beginning of the next pass."""
        return type(self)(self.number + 1)

    def state_dict(self) -> dict[str, Any]:
        """The cursor as plain values, for a checkpoint."""
        state: dict[str, Any] = {"pass": self.number, "offset": self.offset, "postponed": list(self.postponed)}
        if self.rows is not None:
            state["rows"] = list(self.rows)
        if self.history is not None:
            state["history"] = [[row, *stats] for row, stats in self.history.items()]
            state["recent"] = [list(group) for group in self.recent]
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`; ignores other entries of ``state``."""
        saved = state.get("history")
        history = None if saved is None else {row: PromptStats(*stats) for row, *stats in saved}
        recent = tuple(RecentGroup(row, reward) for row, reward in state.get("recent", ()))
        return cls(state["pass"], state["offset"], tuple(state["postponed"]), state.get("rows"), history, recent)


class PromptOrder:
    """The order of the rows in each pass.

    The shuffling is a function of (seed, pass) alone. ``base_order`` returns the rows of a pass by its number
    (``None``: all rows, shuffled), ``curriculum`` selects and orders them (``None``: all), ``column`` gives it the
    values of a column.
    """

    def __init__(
        self,
        total: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        base_order: Callable[[int], Sequence[int]] | None = None,
        curriculum: Curriculum | None = None,
        column: Callable[[str], Sequence[Any]] = lambda name: [],
    ) -> None:
        self.total = total
        self.seed = seed
        self.shuffle = shuffle
        self.base_order = base_order
        self.curriculum = curriculum
        self.column = column
        self._permutations: dict[int, Sequence[int]] = {}

    def take(
        self, count: int, cursor: PromptCursor, *, without: Collection[int] = ()
    ) -> tuple[list[int], PromptCursor]:
        """Take ``count`` different rows, none in ``without``; return them and the cursor after them.

        A batch that spans two passes may meet a row twice. The second occurrence is postponed to the front of the next
        batch, so that no pass loses a row. Raises ValueError if ``count`` is below 1, or there are not as many
        different rows.
        """
        seen = set(without)
        if not 1 <= count <= self.total - len(seen):
            besides = f" besides the {len(seen)} drawn already" if seen else ""
            raise ValueError(f"cannot take {count} different prompts: there are {self.total}{besides}")
        taken: list[int] = []
        skipped: list[int] = []
        first = 0
        while len(taken) < count and first < len(cursor.postponed):
            row = cursor.postponed[first]
            (skipped if row in seen else taken).append(row)
            seen.add(row)
            first += 1
        number, offset, rows = cursor.number, cursor.offset, cursor.rows
        if rows is None:
            rows = self._rows(number, cursor) if offset == 0 else self._permutation(number)
        taken_before_pass = -1  # rows taken when the current pass began; -1: it began in another batch
        while len(taken) < count:
            if offset >= len(rows) and taken_before_pass == len(taken):
                rows = self._with_left_out_rows(number, rows)
            elif offset >= len(rows):
                number, offset, taken_before_pass = number + 1, 0, len(taken)
                rows = self._rows(number, cursor)
                continue
            row = rows[offset]
            (skipped if row in seen else taken).append(row)
            seen.add(row)
            offset += 1
        kept = None if self.curriculum is None else rows
        postponed = (*skipped, *cursor.postponed[first:])
        return taken, cursor._replace(number=number, offset=offset, postponed=postponed, rows=kept)

    def _rows(self, number: int, cursor: PromptCursor) -> Sequence[int]:
        """Return the rows of one pass, ordered by the curriculum from the current history."""
        if self.curriculum is None:
            return self._permutation(number)
        history = {} if cursor.history is None else cursor.history
        asked = PromptPass(number, self._permutation(number), history, self.column, cursor.recent)
        rows = list(self.curriculum(asked))
        wrong = [row for row in rows if not (isinstance(row, Integral) and 0 <= int(row) < self.total)]
        if wrong:
            raise ValueError(
                f"curriculum={self.curriculum!r} has returned {wrong[0]!r} for pass {number}: it must return rows of "
                f"the pass, integers from 0 to {self.total - 1}"
            )
        return list(map(int, rows))  # NumPy's integers are not plain values for a checkpoint

    def _with_left_out_rows(self, number: int, rows: Sequence[int]) -> Sequence[int]:
        """Append the rows that the curriculum leaves out to a pass that is too short to fill a batch."""
        log.warning(
            "pass %d over the prompts has %d rows, too few for an iteration: those that its order leaves out follow",
            *(number, len(set(rows))),
        )
        return list(dict.fromkeys([*rows, *self._permutation(number), *range(self.total)]))

    def _permutation(self, number: int) -> Sequence[int]:
        """Return the order of one pass, cached for two passes. Thread-safe: the dictionary is replaced, not changed."""
        cached = self._permutations
        if number not in cached:
            order: Sequence[int]
            if self.base_order is not None:
                order = self.base_order(number)
            else:
                order = permutation(self.total, seed=self.seed, number=number) if self.shuffle else range(self.total)
            self._permutations = {key: cached[key] for key in cached if key >= number - 1} | {number: order}
            return order
        return cached[number]


class DrawingOrder(Protocol):
    """The order in which prompts of a table or of a stream are drawn."""

    total: int
    """Different prompts."""
    curriculum: Curriculum | None

    def take(self, count: int, cursor: Any, *, without: Collection[Any] = ()) -> tuple[Sequence[Any], Any]:
        """Where ``count`` different prompts are, none of them in ``without``, and the cursor after them."""
        ...


class IterationQueue:
    """The queue of prompts of one iteration: none is drawn twice, and those that were not used can be requeued.

    ``prompt`` returns the prompt at a place; ``fingerprint`` is a digest of the data, included in :attr:`after`.
    """

    def __init__(
        self, order: DrawingOrder, prompt: Callable[[Any], Prompt], cursor: Any, fingerprint: str = ""
    ) -> None:
        self.cursor = cursor
        """Where the next prompt is drawn."""
        self._order = order
        self._prompt = prompt
        self._fingerprint = fingerprint
        self._drawn: dict[int, Any] = {}  # index of a prompt -> its place, in the order of drawing

    @property
    def remaining(self) -> int:
        """Different prompts that can still be drawn."""
        return self._order.total - len(self._drawn)

    def take(self, count: int) -> list[Prompt]:
        """Draw the next prompts, at most :attr:`remaining`."""
        places, self.cursor = self._order.take(count, self.cursor, without=self._drawn.values())
        prompts = [self._prompt(place) for place in places]
        self._drawn |= {prompt.index: place for prompt, place in zip(prompts, places, strict=True)}
        return prompts

    def requeue(self, prompts: Iterable[Prompt]) -> None:
        """Put drawn prompts at the front of the next iteration, in the order of drawing."""
        requeued = {prompt.index for prompt in prompts}
        places = [place for index, place in self._drawn.items() if index in requeued]
        self.cursor = self.cursor._replace(postponed=(*places, *self.cursor.postponed))

    def record(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Remember the rewards of groups, by the index of their prompt; without a curriculum, do nothing."""
        if self._order.curriculum is None:
            return
        history, recent = dict(self.cursor.history or {}), list(self.cursor.recent)
        for index, values in rewards.items():
            if values:
                row = self._drawn[index]
                history[row] = PromptStats.after(history.get(row), values)
                recent.append(RecentGroup(row, history[row].reward))
        self.cursor = self.cursor._replace(history=history, recent=tuple(recent[-MAX_RECENT:]))

    @property
    def after(self) -> dict[str, Any]:
        """Cursor after this iteration and the fingerprint, as plain values."""
        return {**self.cursor.state_dict(), "fingerprint": self._fingerprint}


class TrainingPrompts:
    """Prompts that iterations are drawn from, and the cursor: what those of a table and of a stream share.

    Args:
        cursor: The beginning.
        description: Of the data, for messages.
    """

    def __init__(self, cursor: Any, description: str) -> None:
        self.cursor = cursor
        """Where the next iteration begins."""
        self.description = description

    def order(self) -> DrawingOrder:
        """The order of drawing."""
        raise NotImplementedError

    def prompt(self, place: Any) -> Prompt:
        """The prompt at a place of the order."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Digest of what places depend on."""
        raise NotImplementedError

    def changes(self) -> str:
        """What another fingerprint may come from, for messages."""
        raise NotImplementedError

    def queue(self, after: Mapping[str, Any] | None) -> IterationQueue:
        """The queue of an iteration's prompts, from the cursor or from another queue's ``after``."""
        cursor = self.cursor if after is None else type(self.cursor).from_state_dict(after)
        return IterationQueue(self.order(), self.prompt, cursor, self.fingerprint)

    def set_cursor(self, after: Mapping[str, Any]) -> None:
        """Move the cursor to the end of a trained iteration, unless the data differs."""
        if after["fingerprint"] == self.fingerprint:
            self.cursor = type(self.cursor).from_state_dict(after)

    def state_dict(self) -> dict[str, Any]:
        """The cursor and a fingerprint of the data, as plain values."""
        return {**self.cursor.state_dict(), "fingerprint": self.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved prompt; if the data has changed, warn and begin a new pass."""
        self.cursor = type(self.cursor).from_state_dict(state)
        if state["fingerprint"] not in (None, self.fingerprint):
            log.warning(
                "The prompts of %s are not those that the checkpoint was saved with (%s); the order cannot be "
                "continued, so a new pass over them begins",
                *(self.description, self.changes()),
            )
            self.cursor = self.cursor.new_pass()
