"""Collect groups of an iteration: draw, generate, score, select, until enough are accepted.

With dynamic sampling a rejected group is replaced by that of the next prompt. With oversampling more groups are in
flight than are needed, the first to finish are taken, and the other prompts are requeued; what was made of them may be
kept (partial rollouts). Every rank draws all prompts, generates for its share of them and keeps these samples; what the
ranks decide by is a log that all read in one order.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

from rlhfkit.data.types import Prompt, Sample, decode_texts
from rlhfkit.protocols import DrawnPrompts
from rlhfkit.rank_store import LocalStore, RankLog
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.partial_rollouts import CUT, Dropped, ResumableStream, is_usable

Group = list[Sample]
"""The samples of one prompt."""

_ROUND_GENERATED = "generated"
_POLL_SECONDS = 0.5
"""How long a rank waits for its own samples before it looks for errors of others."""


class GroupStream(Protocol):
    """Groups that an engine is generating: submit prompts, collect what is finished, close when there is enough."""

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start the groups of these prompts, with the seeds of an iteration; ``None``: that of the stream."""
        ...

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Wait for finished groups, up to ``wait`` seconds (``None``: no limit), and return up to ``most``.

        They are in the order of submission; none if the time is over or no submitted prompt is left.
        """
        ...

    def close(self) -> None:
        """Drop the groups that were not collected; a second call does nothing."""
        ...


class StreamingEngine(Protocol):
    """A :class:`~rlhfkit.rollout.engine.RolloutEngine` whose ``can_stream`` is true."""

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> GroupStream:
        """Open a stream, one at a time; raises RuntimeError if no weights are loaded or the engine died."""
        ...


class GroupOutcome(NamedTuple):
    """What all ranks learn of a finished group; its samples stay on the rank that has them."""

    prompt: int
    """Index of its prompt."""
    accepted: bool
    """Whether to train on it."""
    rewards: list[float]
    """Rewards of its samples that have one."""


@dataclass(frozen=True)
class CollectedGroups:
    """What a :class:`GroupSelection` returns."""

    groups: list[Group]
    """Those of this rank, in the order of ``prompts``."""
    prompts: list[int]
    """Indices of the prompts of all ranks' groups, as many as were wanted: accepted ones in prompt order, then rejected
    ones for those that are missing. The same on every rank, as is everything below."""
    accepted: int
    """Groups that were accepted."""
    sampled: int
    """Groups that were generated completely, scored, and accepted or rejected."""
    requeued: int
    """Prompts whose groups were started and dropped."""
    reward: float
    """Mean reward of all groups that were sampled, rejected ones included; NaN if none has one."""
    after: dict[str, Any]
    """Where the next iteration begins."""
    continued: int = 0
    """Groups that an earlier iteration had begun and this one has continued."""
    drawn: Mapping[int, Prompt] = field(default_factory=dict)
    """The prompts by index, as they were drawn; those of samples are as environments have changed them."""
    dropped: Dropped | None = None
    """What the next iteration may continue; ``None``: it is lost."""
    temperature: float | None = None
    """At which they were sampled; ``None``: that of the callback's ``SamplingSpec``."""


@dataclass(eq=False)
class GroupSelection:
    """Draws, generates, scores and selects until enough groups are accepted, or no more may be sampled.

    Without ``spare`` the accepted groups do not depend on which finish first: the drawn prompts are the shortest prefix
    with enough groups to keep. Groups are accepted one by one, so none is left over; all other prompts are requeued.
    What is drawn, accepted and rejected is decided from the log, so equally on every rank.
    """

    wanted: int
    """Groups of the iteration, of all ranks."""
    queue: DrawnPrompts
    """The prompts of the iteration, the same on every rank."""
    stream: GroupStream
    """Generates this rank's groups; closed at the end."""
    _: KW_ONLY
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which the stream is waited for, to measure it."""
    on_finished: Callable[[list[Group]], None] | None = None
    """Called with this rank's groups as they are finished, before they are scored."""
    score: Callable[[list[Sample]], None] | None = None
    """Sets the rewards of this rank's samples, in place; ``None``: they have them."""
    score_together: Callable[[list[Sample]], None] | None = None
    """Adds rewards to this rank's samples, in place; a collective, which ranks without any join."""
    keep: Callable[[Sequence[Sample]], bool] | None = None
    """Whether to train on a group; ``None``: on every group."""
    most: int | None = None
    """Maximum number of prompts to sample; ``None``: no limit."""
    spare: int = 0
    """Groups in flight beyond those that are still missing."""
    rounds: bool = False
    """Score all groups of a rank at once, and draw prompts for rejected groups when all are decided; for engines that
    generate in batches."""
    begun: Dropped | None = None
    """What the iteration before has dropped, to be continued by a ``stream`` that is a
    :class:`~rlhfkit.rollout.partial_rollouts.ResumableStream`, as what this one drops is by the next; ``None``: what is
    dropped is lost."""
    log: RankLog = field(default_factory=lambda: LocalStore().log("groups"))
    """Of the ranks that collect together, inside its :meth:`~rlhfkit.rank_store.RankLog.run`; by default of this
    process alone."""
    position: int = 0
    """Number of the first prompt; prompt n is sampled by rank ``n % world_size``."""

    def __post_init__(self) -> None:
        self.drawn: dict[int, Prompt] = {}  # by index, in the order of drawing
        self.outcomes: dict[int, GroupOutcome] = {}  # by index of the prompt, in the order of the log
        self.accepted = 0
        self.continued = 0
        self._dropped: Dropped | None = None
        self._ranks: dict[int, int] = {}  # who samples the group of each drawn prompt
        self._own: dict[int, Group] = {}
        self._submitted = 0  # this rank's groups that were not collected yet
        self._entries: deque[Any] = deque()  # read, not followed yet

    def run(self) -> CollectedGroups:
        """Collect the groups.

        Raises:
            ValueError: If there are fewer prompts than wanted groups.
            RuntimeError: If the stream ends before all groups were returned.
        """
        try:
            if self.queue.remaining < self.wanted:
                raise ValueError(
                    f"an iteration of {self.wanted} groups needs as many different prompts, and there are "
                    f"{self.queue.remaining}"
                )
            self._draw()
            while not self.finished:
                groups = self._collect()
                if groups and self.score is not None:
                    self.score(flatten(groups))
                if self.score_together is not None:
                    self._wait_for_round()
                    self.score_together(flatten(groups))
                if groups:
                    self.log.append([self._outcome(group) for group in groups])
                self._follow()
            if self.begun is not None:
                with self.waiting():
                    self._cut()
        finally:
            self.stream.close()
        return self._result()

    # ------------------------------------------------------------------ draw

    def _draw(self) -> None:
        """Draw so many prompts that enough groups can be accepted, and submit this rank's share."""
        rejected = len(self.outcomes) - self.accepted
        room = self.queue.remaining if self.most is None else self.most - len(self.drawn)
        count = min(self.wanted + self.spare + rejected - len(self.drawn), self.queue.remaining, room)
        if count < 1:
            return
        prompts = self.queue.take(count)
        self._deal(prompts)
        self.drawn |= {prompt.index: prompt for prompt in prompts}
        share = [prompt for prompt in prompts if self._ranks[prompt.index] == self.log.store.rank]
        self._submitted += len(share)
        begun = [] if self.begun is None else self.begun.begun(share)
        if begun:
            cast(ResumableStream, self.stream).resume(begun)
        known = {group[0].prompt.index for group in begun}
        self.stream.submit([prompt for prompt in share if prompt.index not in known])

    def _deal(self, prompts: Sequence[Prompt]) -> None:
        """Give prompts to the ranks in turn; one whose group was begun goes to the rank that has what was made."""
        for prompt in prompts:
            rank = None if self.begun is None else self.begun.ranks.get(prompt.index)
            if rank is None:
                rank = (self.position + len(self._ranks) - self.continued) % self.log.store.world_size
            else:
                self.continued += 1
            self._ranks[prompt.index] = rank

    @property
    def finished(self) -> bool:
        """Whether enough groups are accepted, or all that may be drawn are decided."""
        return self.accepted >= self.wanted or len(self.outcomes) == len(self.drawn)

    # ------------------------------------------------------------------ this rank's groups

    def _collect(self) -> list[Group]:
        """Wait a while for this rank's groups; with ``rounds`` until all that were submitted are finished."""
        alone, found = self.log.store.world_size == 1, list[Group]()
        while self._submitted and (self.rounds or not found):
            start = time.monotonic()
            # Only with other ranks is there something to look at meanwhile.
            with self.waiting():
                groups = self.stream.collect(max(self.wanted - self.accepted, 1), wait=None if alone else _POLL_SECONDS)
            if groups and self.on_finished is not None:
                self.on_finished(groups)
            if not groups and (alone or time.monotonic() - start < _POLL_SECONDS / 2):
                ended = len(self._own) + len(found)
                raise RuntimeError(
                    f"{ended + self._submitted} groups were asked for, and the engine ended with {ended} of them"
                )
            self._submitted -= len(groups)
            found += groups
            self.log.check()
            if not alone and not self.rounds:
                break  # what other ranks report may ask for more prompts
        self._own |= {group[0].prompt.index: group for group in found}
        return found

    def _outcome(self, group: Group) -> GroupOutcome:
        rewards = [sample.reward for sample in group if sample.reward is not None]
        return GroupOutcome(group[0].prompt.index, self.keep is None or self.keep(group), rewards)

    # ------------------------------------------------------------------ what all ranks decide

    def _read(self, wait: float) -> None:
        self._entries += [entry for _, entry in self.log.read(wait)]

    def _wait_for_round(self) -> None:
        """Wait until all ranks have finished and scored what they were to generate in this round."""
        if self.log.store.world_size == 1:
            return
        self.log.append(_ROUND_GENERATED)
        while self._entries.count(_ROUND_GENERATED) < self.log.store.world_size:
            self._read(1.0)
        # Nothing but outcomes of this round can be behind these entries.
        self._entries = deque(entry for entry in self._entries if entry != _ROUND_GENERATED)

    def _follow(self) -> None:
        """Decide about the groups that the log reports, until this rank has something to do again.

        Prompts are drawn at a place in the log, not when a rank happens to read it, so all ranks draw the same.
        """
        before = len(self.drawn)
        self._read(0.0)
        while True:
            # A faster rank may be in the next round already.
            while self._entries and self._entries[0] != _ROUND_GENERATED:
                self._decide(self._entries.popleft())
            if self.finished or (len(self.drawn) > before if self.rounds else self._submitted):
                return
            self._read(1.0)  # other ranks are generating

    def _decide(self, outcomes: list[GroupOutcome]) -> None:
        for outcome in outcomes:
            if self.accepted >= self.wanted:
                return  # the groups behind come too late
            self.outcomes[outcome.prompt] = outcome
            self.accepted += outcome.accepted
            if self.accepted < self.wanted and (not self.rounds or len(self.outcomes) == len(self.drawn)):
                self._draw()

    def _cut(self) -> None:
        """Stop what is not finished, and keep what was made of it, with groups that were finished too late."""
        late = [group for index, group in self._own.items() if index not in self.outcomes]
        made = cast(ResumableStream, self.stream).cut()
        dropped = {index: rank for index, rank in self._ranks.items() if index not in self.outcomes}
        self._dropped = Dropped.of(dropped, [*late, *made])

    def _result(self) -> CollectedGroups:
        """Return the selected groups, and requeue the prompts of groups that were not finished."""
        decided = [self.outcomes[index] for index in self.drawn if index in self.outcomes]
        kept = [each for each in decided if each.accepted]
        others = [each for each in decided if not each.accepted]
        unfinished = [prompt for index, prompt in self.drawn.items() if index not in self.outcomes]
        self.queue.requeue(unfinished)
        self.queue.record({each.prompt: each.rewards for each in [*kept, *others]})
        rewards = [reward for each in [*kept, *others] for reward in each.rewards]
        chosen = [each.prompt for each in kept + others[: self.wanted - len(kept)]]
        return CollectedGroups(
            groups=[self._own[index] for index in chosen if index in self._own],
            prompts=chosen,
            accepted=len(kept),
            sampled=len(decided),
            requeued=len(unfinished),
            reward=sum(rewards) / len(rewards) if rewards else math.nan,
            after=self.queue.after,
            continued=self.continued,
            drawn={index: self.drawn[index] for index in chosen},
            dropped=self._dropped,
        )


def flatten(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group]


class BatchedGroupStream:
    """A stream for engines that return all groups at once; ``generate`` keeps the order of the prompts."""

    def __init__(self, generate: Callable[[list[Prompt]], list[Group]]) -> None:
        self._generate = generate
        self._prompts: list[Prompt] = []
        self._groups: list[Group] = []

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Add the prompts to those of the next :meth:`collect`."""
        self._prompts += prompts

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Generate for all submitted prompts, unless finished groups are left; cannot stop before they are done."""
        if not self._groups and self._prompts:
            prompts, self._prompts = self._prompts, []
            self._groups = self._generate(prompts)
        returned, self._groups = self._groups[:most], self._groups[most:]
        return returned

    def close(self) -> None:
        self._prompts, self._groups = [], []


class OpenGroups:
    """The groups of a stream that were not collected: their prompts, by number, and the samples that are finished.

    Args:
        sampling: How they are sampled.
    """

    def __init__(self, sampling: SamplingSpec) -> None:
        self.sampling = sampling
        self.prompts: dict[int, Prompt] = {}
        """Those whose groups are not complete."""
        self.begun: dict[tuple[int, int], Sample] = {}
        """What is to be continued, by the number of the prompt and the position in its group; taken out by who does."""
        self._number = 0  # of the next prompt
        self._samples: dict[int, Group] = {}
        self._complete: list[int] = []

    def open(self, prompts: Sequence[Prompt]) -> range:
        """Add prompts; returns their numbers."""
        first, self._number = self._number, self._number + len(prompts)
        self.prompts |= dict(enumerate(prompts, first))
        return range(first, self._number)

    def reopen(self, groups: Sequence[Group]) -> dict[int, list[int]]:
        """Add groups of which something was sampled, and fill :attr:`begun`.

        Returns:
            The positions that are not finished, by the number of the prompt.
        """
        missing: dict[int, list[int]] = {}
        for number, group in zip(self.open([group[0].prompt for group in groups]), groups, strict=True):
            usable = {sample.sample_index: sample for sample in group if is_usable(sample, self.sampling)}
            finished = [sample for sample in usable.values() if sample.finish_reason != CUT]
            left = sorted({*range(self.sampling.group_size)} - {sample.sample_index for sample in finished})
            missing[number] = left
            self.begun |= {(number, index): usable[index] for index in left if index in usable}
            self.add(number, finished)
        return missing

    def add(self, number: int, samples: Iterable[Sample]) -> None:
        """Add finished samples of a prompt."""
        group = self._samples.setdefault(number, [])
        group += samples
        if len(group) == self.sampling.group_size:
            del self.prompts[number]
            self._complete.append(number)

    @property
    def complete(self) -> bool:
        """Whether there is a group to take."""
        return bool(self._complete)

    def take(self, most: int) -> list[Group]:
        """Take up to ``most`` complete groups, in the order of their prompts."""
        self._complete.sort()
        numbers, self._complete = self._complete[:most], self._complete[most:]
        return [sorted(self._samples.pop(number), key=lambda sample: sample.sample_index) for number in numbers]

    def take_all(self) -> list[Group]:
        """Take what there is of all groups, with what was begun; samples without a token are left out."""
        for (number, _), sample in self.begun.items():
            self._samples.setdefault(number, []).append(sample)
        groups = [[sample for sample in group if sample.num_tokens] for _, group in sorted(self._samples.items())]
        self.clear()
        return [group for group in groups if group]

    def clear(self) -> None:
        self.prompts, self.begun, self._samples, self._complete = {}, {}, {}, []


def all_groups(
    stream: GroupStream, prompts: Sequence[Prompt], *, check: Callable[[], None] | None = None
) -> list[Group]:
    """Return the groups of all prompts, in prompt order, from a new stream; RuntimeError if groups are missing.

    ``check`` is called every half second and may raise.
    """
    groups: list[Group] = []
    wait = None if check is None else _POLL_SECONDS
    try:
        stream.submit(prompts)
        while len(groups) < len(prompts):
            start = time.monotonic()
            finished = stream.collect(len(prompts), wait=wait)
            if not finished and (wait is None or time.monotonic() - start < wait / 2):
                raise RuntimeError(f"the engine ended with {len(groups)} of {len(prompts)} groups")
            groups += finished
            if check is not None:
                check()
    finally:
        stream.close()
    # By index: the prompt of an episode is another object where its environment began the conversation.
    order = {prompt.index: place for place, prompt in enumerate(prompts)}
    return sorted(groups, key=lambda group: order[group[0].prompt.index])


def sample_all(stream: GroupStream, prompts: Sequence[Prompt], *, tokenizer: Any = None) -> list[Sample]:
    """Return the samples of :func:`all_groups`. With a ``tokenizer`` they have texts, for who calls an engine."""
    samples = flatten(all_groups(stream, prompts))
    return samples if tokenizer is None else with_texts(samples, tokenizer)


def with_texts(samples: list[Sample], tokenizer: Any) -> list[Sample]:
    """Set the texts of samples, and return the samples."""
    decode_texts(samples, partial(tokenizer.batch_decode, skip_special_tokens=True))
    return samples
