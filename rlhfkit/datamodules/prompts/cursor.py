"""The endless sequence of shuffled passes over the prompts, and how an iteration draws from it and puts back.

Every pass has each row once, no iteration has a row twice, and what an iteration drew without using it comes first in
the next one. Nothing here changes while prompts are drawn: a cursor says where a sequence continues, and whoever trains
on what was drawn decides when the cursor moves.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, Self

from rlhfkit.data.shuffling import permutation
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.datamodules.prompts.curriculum import Order, PromptPass, PromptStats

log = logging.getLogger(__name__)


class PromptCursor(NamedTuple):
    """Where in the endless sequence of shuffled passes the next prompt is."""

    number: int = 0
    """Passes finished."""
    offset: int = 0
    """Rows of the current pass that were taken or put off."""
    postponed: tuple[int, ...] = ()
    """Rows before the offset that were put off: the batch that reached them had them already, or gave them back."""
    rows: Sequence[int] | None = None
    """The current pass as a curriculum has ordered it; ``None``: there is none."""
    history: Mapping[int, PromptStats] | None = None
    """What a curriculum knows of each row that was sampled."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        state: dict[str, Any] = {"pass": self.number, "offset": self.offset, "postponed": list(self.postponed)}
        if self.rows is not None:
            state["rows"] = list(self.rows)
        if self.history is not None:
            state["history"] = [[row, *worth] for row, worth in self.history.items()]
        return state

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`.

        Args:
            state: May have other entries too.
        """
        history = state.get("history")
        known = None if history is None else {row: PromptStats(*worth) for row, *worth in history}
        return cls(state["pass"], state["offset"], tuple(state["postponed"]), state.get("rows"), known)


class PromptOrder:
    """The order of the rows.

    Args:
        total: Rows.
        seed: Of the shuffling, which is a function of (seed, pass) and nothing else.
        shuffle: The order of the rows in every pass when false.
        plain: The rows of a pass by its number, in place of all rows, shuffled.
        curriculum: What makes of these the rows that are sampled.
        column: Values by row, for the curriculum.
    """

    def __init__(
        self,
        total: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        plain: Callable[[int], Sequence[int]] | None = None,
        curriculum: Order | None = None,
        column: Callable[[str], Sequence[Any]] = lambda name: [],
    ) -> None:
        self.total = total
        self.seed = seed
        self.shuffle = shuffle
        self.plain = plain
        self.curriculum = curriculum
        self.column = column
        self._permutations: dict[int, Sequence[int]] = {}

    def take(
        self, count: int, cursor: PromptCursor, *, without: Collection[int] = ()
    ) -> tuple[list[int], PromptCursor]:
        """Different rows from the cursor on, and the cursor behind them.

        A batch that spans two passes may meet a row that it has from the first of them; that row is put off to the
        front of the next batch, so no batch has a row twice and no pass loses one.

        Args:
            count: Rows.
            cursor: Where to begin.
            without: Rows that the batch has already, from an earlier call.

        Raises:
            ValueError: If ``count`` is below 1, or there are not as many different rows.
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
        before = -1  # rows taken when the current pass began; -1: it began in another batch
        while len(taken) < count:
            if offset >= len(rows) and before == len(taken):
                rows = self._and_the_rest(number, rows)
            elif offset >= len(rows):
                number, offset, before = number + 1, 0, len(taken)
                rows = self._rows(number, cursor)
                continue
            row = rows[offset]
            (skipped if row in seen else taken).append(row)
            seen.add(row)
            offset += 1
        kept = None if self.curriculum is None else rows
        return taken, PromptCursor(number, offset, (*skipped, *cursor.postponed[first:]), kept, cursor.history)

    def _rows(self, number: int, cursor: PromptCursor) -> Sequence[int]:
        """The rows of one pass, as the curriculum wants them now."""
        if self.curriculum is None:
            return self._permutation(number)
        known = {} if cursor.history is None else cursor.history
        rows = list(self.curriculum(PromptPass(number, self._permutation(number), known, self.column)))
        wrong = [row for row in rows if not (isinstance(row, Integral) and 0 <= int(row) < self.total)]
        if wrong:
            raise ValueError(
                f"order={self.curriculum!r} has returned {wrong[0]!r} for pass {number}: it must return rows of the "
                f"pass, integers from 0 to {self.total - 1}"
            )
        return list(map(int, rows))  # NumPy's are no plain values for a checkpoint

    def _and_the_rest(self, number: int, rows: Sequence[int]) -> Sequence[int]:
        """A pass that had nothing new for a batch: what it leaves out follows, or the batch would never be full."""
        log.warning(
            "pass %d over the prompts has %d rows, too few for an iteration: those that its order leaves out follow",
            *(number, len(set(rows))),
        )
        return list(dict.fromkeys([*rows, *self._permutation(number), *range(self.total)]))

    def _permutation(self, number: int) -> Sequence[int]:
        """Order of one pass; the last few are remembered. Safe in several threads: the dictionary is replaced whole."""
        known = self._permutations
        if number not in known:
            order: Sequence[int]
            if self.plain is not None:
                order = self.plain(number)
            else:
                order = permutation(self.total, seed=self.seed, number=number) if self.shuffle else range(self.total)
            self._permutations = {key: known[key] for key in known if key >= number - 1} | {number: order}
            return order
        return known[number]


class PromptDraws:
    """What one iteration draws: no prompt twice, and some of it may be put back.

    Args:
        order: The sequence.
        prompt: The prompt of a row.
        cursor: Where the iteration begins.
        fingerprint: Of the data, which goes into :attr:`after`.
    """

    def __init__(
        self, order: PromptOrder, prompt: Callable[[int], Prompt], cursor: PromptCursor, fingerprint: str = ""
    ) -> None:
        self._order = order
        self._prompt = prompt
        self._cursor = cursor
        self._fingerprint = fingerprint
        self._rows: dict[int, int] = {}  # index of a prompt -> its row, in the order of drawing
        self._returned: set[int] = set()

    @property
    def left(self) -> int:
        """Different prompts that can still be drawn."""
        return self._order.total - len(self._rows)

    def take(self, count: int) -> list[Prompt]:
        """The next prompts.

        Args:
            count: At least 1, and at most :attr:`left`.
        """
        rows, self._cursor = self._order.take(count, self._cursor, without=self._rows.values())
        prompts = [self._prompt(row) for row in rows]
        self._rows |= {prompt.index: row for prompt, row in zip(prompts, rows, strict=True)}
        return prompts

    def requeue(self, prompts: Iterable[Prompt]) -> None:
        """Have prompts come first in the next iteration, in the order in which they were drawn here.

        Args:
            prompts: Drawn here and not used.
        """
        self._returned |= {prompt.index for prompt in prompts}

    def record(self, groups: Iterable[Sequence[Sample]]) -> None:
        """Remember what the samples of prompts were worth, if there is a curriculum that asks for it.

        Args:
            groups: Of prompts drawn here, with their rewards.
        """
        if self._order.curriculum is None:
            return
        history = dict(self._cursor.history or {})
        for group in groups:
            rewards = [sample.reward for sample in group if sample.reward is not None]
            if rewards:
                row = self._rows[group[0].prompt.index]
                before = history[row].samples if row in history else 0
                history[row] = PromptStats(before + len(rewards), sum(rewards) / len(rewards))
        self._cursor = self._cursor._replace(history=history)

    @property
    def after(self) -> dict[str, Any]:
        """Where the next iteration begins when this one was trained on, as plain values."""
        returned = [row for index, row in self._rows.items() if index in self._returned]
        cursor = self._cursor._replace(postponed=(*returned, *self._cursor.postponed))
        return {**cursor.state_dict(), "fingerprint": self._fingerprint}
