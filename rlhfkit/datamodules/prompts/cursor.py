"""How iterations draw prompts: the cursor, the queue of an iteration, and what prompts of tables and streams share.

No iteration has a prompt twice, and prompts that were drawn but not used come first in the next iteration. Drawing does
not move the saved cursor; it moves once an iteration was trained on.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rlhfkit.data.types import Prompt
from rlhfkit.datamodules.prompts.curriculum import MAX_RECENT, Curriculum, PromptStats, RecentGroup

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


class IterationQueue:
    """The queue of prompts of one iteration: none is drawn twice, and those that were not used can be requeued."""

    def __init__(self, prompts: "TrainingPrompts", cursor: Any) -> None:
        self.cursor = cursor
        """Where the next prompt is drawn."""
        self._prompts = prompts
        self._fingerprint = prompts.fingerprint
        self._drawn: dict[int, Any] = {}  # index of a prompt -> its place, in the order of drawing

    @property
    def remaining(self) -> int:
        """Different prompts that can still be drawn."""
        return self._prompts.total - len(self._drawn)

    def take(self, count: int) -> list[Prompt]:
        """Draw the next prompts, at most :attr:`remaining`."""
        places, self.cursor = self._prompts.take(count, self.cursor, without=self._drawn.values())
        prompts = [self._prompts.prompt(place) for place in places]
        self._drawn |= {prompt.index: place for prompt, place in zip(prompts, places, strict=True)}
        return prompts

    def requeue(self, prompts: Iterable[Prompt]) -> None:
        """Put drawn prompts at the front of the next iteration, in the order of drawing."""
        requeued = {prompt.index for prompt in prompts}
        places = [place for index, place in self._drawn.items() if index in requeued]
        self.cursor = self.cursor._replace(postponed=(*places, *self.cursor.postponed))

    def record(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Remember the rewards of groups, by the index of their prompt; without a curriculum, do nothing."""
        if self._prompts.curriculum is None:
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
        """Cursor after this iteration and the fingerprint of the data, as plain values."""
        return {**self.cursor.state_dict(), "fingerprint": self._fingerprint}


class TrainingPrompts:
    """Prompts that iterations are drawn from, and the cursor: what those of a table and of a stream share.

    Args:
        cursor: The beginning.
        description: Of the data, for messages.
    """

    curriculum: Curriculum | None = None

    def __init__(self, cursor: Any, description: str) -> None:
        self.cursor = cursor
        """Where the next iteration begins."""
        self.description = description

    @property
    def total(self) -> int:
        """Different prompts."""
        raise NotImplementedError

    def take(self, count: int, cursor: Any, *, without: Collection[Any] = ()) -> tuple[Sequence[Any], Any]:
        """The places of ``count`` different prompts, none of them in ``without``, and the cursor after them."""
        raise NotImplementedError

    def prompt(self, place: Any) -> Prompt:
        """The prompt at a place."""
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
        return IterationQueue(self, self.cursor if after is None else type(self.cursor).from_state_dict(after))

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
