"""The model of an iteration on the ranks: processor seconds of each part and bytes, from what the parts depend on.

A part of a rank's work takes ``Σ constant * driver`` seconds. Drivers are numbers of the workload: the tokens of a
rank's own rows, the sequences of all ranks, and so on. Constants are measured by running the real code at small size
(``calibration.py``). Everything here is a pure function.

A part is **serial** if more ranks do not make it shorter: every rank does all of it, or one process does it for all.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration, all ranks together."""

    sequences: int
    group_size: int
    prompt_tokens: float
    """Of each prompt."""
    answer_tokens: float
    """Mean of an answer."""
    longest: float
    """Tokens of the longest sequence."""
    ranks: int
    micro_batch_size: float = 4.0
    """Sequences of a micro-batch, of a forward group by the number of its ranks."""

    @property
    def tokens(self) -> float:
        """Of a sequence: prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def own_sequences(self) -> float:
        """Of one rank."""
        return self.sequences / self.ranks

    @property
    def own_tokens(self) -> float:
        """Of one rank's rows."""
        return self.own_sequences * self.tokens

    @property
    def moved_tokens(self) -> float:
        """Of the rows that a rank sends, and of those that it receives, if rows fall on ranks at random."""
        return self.own_tokens * (1 - 1 / self.ranks)

    @property
    def groups(self) -> float:
        """Prompts of the iteration."""
        return self.sequences / self.group_size


DRIVERS: Mapping[str, Callable[[Workload], float]] = {
    "own token": lambda work: work.own_tokens,
    "own padded token": lambda work: work.own_sequences * work.longest,
    "own answer token": lambda work: work.own_sequences * work.answer_tokens,
    "own sequence": lambda work: work.own_sequences,
    "own micro-batch": lambda work: work.own_sequences / work.micro_batch_size,
    "moved token": lambda work: work.moved_tokens,
    "token": lambda work: work.own_tokens * work.ranks,
    "sequence": lambda work: float(work.sequences),
    "sequence x log": lambda work: work.sequences * math.log2(max(work.sequences, 2)),
    "group": lambda work: work.groups,
    "rank": lambda work: float(work.ranks),
    "other rank": lambda work: float(work.ranks - 1),
    "iteration": lambda work: 1.0,
}
"""What parts can depend on."""

Constants = Mapping[str, Mapping[str, float]]
"""Of each part, by driver: seconds, or bytes for parts of memory and traffic."""


BYTES = ("resident", "peak", "sent")
"""Names of constants that are bytes."""


def is_divided(driver: str) -> bool:
    """Whether more ranks make a driver smaller."""
    return driver.startswith(("own ", "moved "))


def cost(constants: Mapping[str, float], work: Workload) -> float:
    """``Σ constant * driver``."""
    return sum(constant * DRIVERS[driver](work) for driver, constant in constants.items())


@dataclass(frozen=True)
class Prediction:
    """What one rank needs for an iteration."""

    seconds: dict[str, float]
    """Processor seconds by part."""
    resident: float
    """Bytes that it holds while it trains, beyond those of a process without an iteration."""
    peak: float
    """Bytes of its resident set at their highest, with what the allocator keeps."""
    sent: float
    """Bytes that the rank sends to others."""

    @property
    def total(self) -> float:
        """Processor seconds of all parts."""
        return sum(self.seconds.values())


def predict(constants: Constants, work: Workload) -> Prediction:
    """What a rank needs; ``constants`` has the parts of time and those of bytes, :data:`BYTES`."""
    seconds = {part: cost(each, work) for part, each in constants.items() if part not in BYTES}
    return Prediction(seconds, **{name: cost(constants.get(name, {}), work) for name in BYTES})


def serial_seconds(constants: Constants, work: Workload) -> dict[str, float]:
    """Of each part that has some: processor seconds that more ranks do not make shorter."""
    found = {}
    for part, drivers in constants.items():
        whole = {driver: constant for driver, constant in drivers.items() if constant and not is_divided(driver)}
        if whole and part not in BYTES:
            found[part] = cost(whole, work)
    return found


# ------------------------------------------------------------------ the store that ranks wait on


@dataclass(frozen=True, kw_only=True)
class StoreUse:
    """What the ranks ask of the store in one iteration, and what the process that holds it needs to answer."""

    request: float
    """Processor seconds of an answered request."""
    write: float
    """Processor seconds of a value that is set, which is not answered."""
    key: float
    """Processor seconds of a value that is read among several."""
    byte: float
    """Processor seconds of a byte of it."""

    def iteration_seconds(
        self, work: Workload, *, entries_per_rank: float, bytes_per_group: float, requests_per_rank: float
    ) -> float:
        """Processor seconds for the log of an iteration: every rank writes its entries and reads those of all.

        Args:
            work: The iteration.
            entries_per_rank: Entries that a rank writes, besides one for each group (when groups are reported one by
                one, as streaming engines finish them).
            bytes_per_group: Of an entry that reports one group, pickled.
            requests_per_rank: Answered requests of a rank besides those of its entries.
        """
        entries = work.groups + entries_per_rank * work.ranks
        read = work.ranks * (entries * self.key + work.groups * bytes_per_group * self.byte)
        return entries * (self.write + self.request) + read + work.ranks * requests_per_rank * self.request

    def waiting_share(self, ranks: int, *, polls: float, heartbeat: float = 1.0) -> float:
        """Processor seconds per second while all ranks wait: polls, heartbeats, and every rank's look at all of these.

        Args:
            ranks: That wait.
            polls: Of a rank per second.
            heartbeat: Seconds between two heartbeats of a rank, and between two looks at those of all.
        """
        each = polls * self.request + (self.write + self.request + ranks * self.key) / heartbeat
        return ranks * each
