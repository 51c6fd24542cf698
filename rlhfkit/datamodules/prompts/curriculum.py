"""Curricula: functions that order a pass over the prompts, or leave prompts out, by what is known of them.

A curriculum is called once per pass, when its first prompt is drawn, with the rewards of all iterations drawn before.
The result therefore does not depend on how far sampling is ahead of training. Result and rewards are in checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from rlhfkit.validation import check_integer, check_number


class PromptStats(NamedTuple):
    """Rewards of a prompt's samples.

    Attributes:
        samples: Scored samples so far.
        reward: Mean reward of the latest group.
        mean: Mean reward of all scored samples so far.
    """

    samples: int
    reward: float
    mean: float

    @classmethod
    def after(cls, earlier: "PromptStats | None", rewards: Sequence[float]) -> "PromptStats":
        """The statistics of a prompt with one more group, of one scored sample or more."""
        samples, total = (0, 0.0) if earlier is None else (earlier.samples, earlier.samples * earlier.mean)
        count = samples + len(rewards)
        return cls(count, sum(rewards) / len(rewards), (total + sum(rewards)) / count)


class RecentGroup(NamedTuple):
    """A group that was sampled.

    Attributes:
        row: The prompt's.
        reward: Mean reward of its scored samples.
    """

    row: int
    reward: float


MAX_RECENT = 1024
"""Groups that :attr:`PromptPass.recent` has at most."""


@dataclass(frozen=True)
class PromptPass:
    """A pass over the prompts, to be ordered by a curriculum; a row is a position among the prompts in use.

    Attributes:
        number: Passes before this one.
        rows: All rows in their order without a curriculum: shuffled, sources mixed.
        history: Statistics by row, of the prompts that were sampled.
        column: Returns the values of a data column, by row.
        recent: The latest groups with a scored sample, the newest last, up to :data:`MAX_RECENT`: what a curriculum
            goes by that follows the policy's progress. Saved with the position in the data, so that a curriculum needs
            no state of its own to resume exactly.
    """

    number: int
    rows: Sequence[int]
    history: Mapping[int, PromptStats]
    column: Callable[[str], Sequence[Any]]
    recent: Sequence[RecentGroup] = ()


Curriculum = Callable[[PromptPass], Sequence[int]]
"""Returns the rows of a pass in the order in which they are to be sampled. A row that it leaves out is not sampled in
this pass, unless an iteration could not be filled otherwise; a row that it names twice is sampled twice, but never
twice in one iteration."""


@runtime_checkable
class DeclaresHistoryUse(Protocol):
    """A curriculum that declares whether it reads ``PromptPass.history`` or ``recent``; others are assumed to."""

    uses_rewards: bool


@dataclass(frozen=True)
class ByColumn:
    """Order a pass by the values of a column, easy prompts first (Bengio et al., 2009); ties stay shuffled.

    Example::

        PromptDataModule("math.jsonl", curriculum=ByColumn("difficulty"))
    """

    name: str
    """Column of values that can be compared."""
    descending: bool = False
    """Largest values first."""
    passes: int | None = None
    """How many passes are ordered, from the first; ``None``: all."""
    uses_rewards: ClassVar[bool] = False
    """It does not read ``PromptPass.history``; see :class:`DeclaresHistoryUse`."""

    def __post_init__(self) -> None:
        """Check the count."""
        check_integer("passes", self.passes, minimum=0, optional=True)

    def __call__(self, one: PromptPass) -> Sequence[int]:
        """Sort the rows, keeping the order of ties."""
        if self.passes is not None and one.number >= self.passes:
            return one.rows
        values = one.column(self.name)
        # Sorting the reversed rows and reversing the result keeps the order of ties when descending.
        rows = list(reversed(one.rows)) if self.descending else list(one.rows)
        rows.sort(key=lambda row: values[row])
        return rows[::-1] if self.descending else rows


@dataclass(frozen=True)
class BySuccess:
    """Leave out most prompts whose latest samples were all right or all wrong, which give no policy gradient.

    Selects by success rate, as SPEED (Zhang et al., 2025, arXiv:2506.09016) and DAPO's dynamic sampling do, but before
    anything is sampled. A share of these prompts is kept, because policies improve and forget.

    Example::

        PromptDataModule("math.jsonl", curriculum=BySuccess(keep=0.2))
    """

    low: float = 0.0
    """A prompt is hopeless if the mean reward of its latest group is at most this."""
    high: float = 1.0
    """A prompt is solved if the mean reward of its latest group is at least this."""
    keep: float = 0.1
    """Probability that a solved or hopeless prompt is in a pass."""
    seed: int = 0
    """Seed of the random choice, a function of (seed, pass, row)."""

    def __post_init__(self) -> None:
        """Check the bounds."""
        check_number("low", self.low)
        check_number("high", self.high, above=self.low, why="prompts between low and high are kept")
        check_number("keep", self.keep, minimum=0, maximum=1, why="it is a probability")
        check_integer("seed", self.seed)

    def __call__(self, one: PromptPass) -> Sequence[int]:
        """Select the rows, in their order."""
        return [row for row in one.rows if self._is_selected(one, row)]

    def _is_selected(self, one: PromptPass, row: int) -> bool:
        stats = one.history.get(row)
        if stats is None or self.low < stats.reward < self.high:
            return True
        digest = blake2b(f"{self.seed}/{one.number}/{row}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64 < self.keep
