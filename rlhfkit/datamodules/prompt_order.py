"""The endless sequence of shuffled passes over the prompts, and how an iteration draws from it and puts back.

Every pass has each row once, no iteration has a row twice, and what an iteration drew without using it comes first in
the next one. Nothing here changes while prompts are drawn: a cursor says where a sequence continues, and whoever trains
on what was drawn decides when the cursor moves.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Self

from rlhfkit.data.experience import Prompt
from rlhfkit.data.shuffling import permutation


class PromptCursor(NamedTuple):
    """Where in the endless sequence of shuffled passes the next prompt is."""

    number: int = 0
    """Passes finished."""
    offset: int = 0
    """Rows of the current pass that were taken or put off."""
    postponed: tuple[int, ...] = ()
    """Rows before the offset that were put off: the batch that reached them had them already, or gave them back."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"pass": self.number, "offset": self.offset, "postponed": list(self.postponed)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Self:
        """Inverse of :meth:`state_dict`.

        Args:
            state: May have other entries too.
        """
        return cls(state["pass"], state["offset"], tuple(state["postponed"]))


class PromptOrder:
    """The order of the rows.

    Args:
        total: Rows.
        seed: Of the shuffling, which is a function of (seed, pass) and nothing else.
        shuffle: The order of the rows in every pass when false.
    """

    def __init__(self, total: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.total = total
        self.seed = seed
        self.shuffle = shuffle
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
        number, offset = cursor.number, cursor.offset
        while len(taken) < count:
            if offset == self.total:
                number, offset = number + 1, 0
            row = self._permutation(number)[offset]
            (skipped if row in seen else taken).append(row)
            seen.add(row)
            offset += 1
        return taken, PromptCursor(number, offset, (*skipped, *cursor.postponed[first:]))

    def _permutation(self, number: int) -> Sequence[int]:
        """Order of one pass; the last few are remembered. Safe in several threads: the dictionary is replaced whole."""
        known = self._permutations
        if number not in known:
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

    def put_back(self, prompts: Iterable[Prompt]) -> None:
        """Have prompts come first in the next iteration, in the order in which they were drawn here.

        Args:
            prompts: Drawn here and not used.
        """
        self._returned |= {prompt.index for prompt in prompts}

    @property
    def after(self) -> dict[str, Any]:
        """Where the next iteration begins when this one was trained on, as plain values."""
        returned = [row for index, row in self._rows.items() if index in self._returned]
        cursor = self._cursor._replace(postponed=(*returned, *self._cursor.postponed))
        return {**cursor.state_dict(), "fingerprint": self._fingerprint}
