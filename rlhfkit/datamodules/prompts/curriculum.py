"""Which prompts come when: functions that order a pass over the data, by what is known of its prompts.

``PromptDataModule(order=...)`` takes any function of a :class:`PromptPass` that returns rows. It is asked once per
pass, when the first prompt of the pass is drawn, and with the rewards of every iteration drawn before: however far
sampling is ahead of learning, the answer depends on the sequence of samples alone. Answer and rewards are saved.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from rlhfkit.validation import check_integer, check_number


class PromptStats(NamedTuple):
    """What the samples of a prompt were worth."""

    samples: int
    """Scored samples so far."""
    reward: float
    """Mean reward of the latest group."""


@dataclass(frozen=True)
class PromptPass:
    """A pass over the prompts that is to be ordered; a row is a prompt's place among those that are used."""

    number: int
    """Passes before it."""
    rows: Sequence[int]
    """In the order that they have without a curriculum: shuffled, mixed."""
    history: Mapping[int, PromptStats]
    """By row, of the prompts that were sampled."""
    column: Callable[[str], Sequence[Any]]
    """The values of a column of the data, by row."""


Order = Callable[[PromptPass], Sequence[int]]
"""Rows of a pass in the order in which they are to be sampled. What it leaves out is not sampled in this pass (except
where an iteration could not be filled otherwise); a row that it names twice comes twice, never in one iteration."""


@runtime_checkable
class DeclaresHistoryUse(Protocol):
    """An order that says whether it reads ``PromptPass.history``; one that does not say so is assumed to."""

    uses_rewards: bool


@dataclass(frozen=True)
class ByColumn:
    """Easy prompts first (Bengio et al., 2009): in the order of a column's values, shuffled where they are equal.

    Example::

        PromptDataModule("math.jsonl", order=ByColumn("difficulty"))
    """

    name: str
    """Of the column; values that can be compared."""
    descending: bool = False
    """Largest first."""
    passes: int | None = None
    """Only the first so many passes are ordered; ``None``: all."""
    uses_rewards: ClassVar[bool] = False
    """It does not read ``PromptPass.history``; see :class:`DeclaresHistoryUse`."""

    def __post_init__(self) -> None:
        """Check the count."""
        check_integer("passes", self.passes, minimum=0, optional=True)

    def __call__(self, one: PromptPass) -> Sequence[int]:
        """Sort, stably."""
        if self.passes is not None and one.number >= self.passes:
            return one.rows
        values = one.column(self.name)
        # Sorted in reverse of reverse: a stable order in both directions.
        rows = list(reversed(one.rows)) if self.descending else list(one.rows)
        rows.sort(key=lambda row: values[row])
        return rows[::-1] if self.descending else rows


@dataclass(frozen=True)
class BySuccess:
    """Leave out most prompts whose latest samples were all right or all wrong: they teach nothing.

    Selection by success rate as in SPEED (Zhang et al., 2025, arXiv:2506.09016), and as DAPO's dynamic sampling does
    it, here before anything is sampled. A share of them is kept, because policies improve, and forget.

    Example::

        PromptDataModule("math.jsonl", order=BySuccess(keep=0.2))
    """

    low: float = 0.0
    """Hopeless at this mean reward of the latest group, or less."""
    high: float = 1.0
    """Solved at this mean reward of the latest group, or more."""
    keep: float = 0.1
    """Chance that such a prompt is in a pass all the same."""
    seed: int = 0
    """Of who is kept, which is a function of (seed, pass, row)."""

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_number("low", self.low)
        check_number("high", self.high, above=self.low, why="prompts between low and high are kept")
        check_number("keep", self.keep, minimum=0, maximum=1, why="it is a probability")
        check_integer("seed", self.seed)

    def __call__(self, one: PromptPass) -> Sequence[int]:
        """Choose."""
        return [row for row in one.rows if self._wanted(one, row)]

    def _wanted(self, one: PromptPass, row: int) -> bool:
        worth = one.history.get(row)
        if worth is None or self.low < worth.reward < self.high:
            return True
        digest = blake2b(f"{self.seed}/{one.number}/{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < self.keep
