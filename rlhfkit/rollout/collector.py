"""Collect the groups of one iteration: draw prompts, generate, score, select, until enough groups are accepted.

With dynamic sampling a rejected group is replaced by that of the next prompt. With oversampling more groups are in
flight than are needed, the first to finish are taken, and the other prompts are requeued.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.protocols import PromptQueue
from rlhfkit.rollout.engine import SamplingSpec

Group = list[Sample]
"""The samples of one prompt."""


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


class Ranks(Protocol):
    """The ranks that collect an iteration together."""

    def share(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts that this rank generates for."""
        ...

    def gather(self, step: Callable[[], list[Group]]) -> list[Group]:
        """Run a step on every rank and return the groups of all, in the order of their prompts. A collective."""
        ...


class OneRank:
    """A single process that collects alone."""

    def share(self, prompts: list[Prompt]) -> list[Prompt]:
        """All prompts."""
        return prompts

    def gather(self, step: Callable[[], list[Group]]) -> list[Group]:
        """The groups of this process."""
        return step()


@dataclass(frozen=True)
class CollectedGroups:
    """What :func:`collect_groups` returns."""

    groups: list[Group]
    """As many as were wanted: accepted ones in prompt order, then rejected ones for those that are missing."""
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


def collect_groups(
    wanted: int,
    queue: PromptQueue,
    stream: GroupStream,
    *,
    score: Callable[[list[Sample]], None] | None = None,
    score_together: Callable[[list[Sample]], None] | None = None,
    keep: Callable[[Sequence[Sample]], bool] | None = None,
    most: int | None = None,
    spare: int = 0,
    ranks: Ranks | None = None,
) -> CollectedGroups:
    """Draw, generate, score and select until enough groups are accepted, or no more may be sampled.

    Without ``spare`` the accepted groups do not depend on which finish first: the drawn prompts are the shortest prefix
    with enough groups to keep. Groups are accepted one by one, so none is left over; all other prompts are requeued.

    Args:
        wanted: Groups of the iteration.
        queue: The prompts of the iteration.
        stream: Generates the groups of this rank's share of the prompts; closed at the end.
        score: Sets texts and rewards of this rank's samples, in place; ``None``: they have them.
        score_together: Adds rewards that need the samples of all ranks, in place.
        keep: Whether to train on a group; ``None``: on every group.
        most: Maximum number of prompts to sample; ``None``: no limit.
        spare: Groups in flight beyond those that are still missing.
        ranks: Divides the work among ranks; ``None``: this process does all of it.

    Raises:
        ValueError: If there are fewer prompts than wanted groups.
        RuntimeError: If the stream ends before all groups were returned.
    """
    ranks = ranks or OneRank()
    drawn: list[Prompt] = []
    accepted: dict[int, Group] = {}
    rejected: dict[int, Group] = {}

    def draw(count: int) -> None:
        count = min(count, queue.remaining, (queue.remaining if most is None else most - len(drawn)))
        if count > 0:
            prompts = queue.take(count)
            drawn.extend(prompts)
            stream.submit(ranks.share(prompts))

    def generate_and_score() -> list[Group]:
        groups = stream.collect(wanted - len(accepted))
        if groups and score is not None:
            score(flatten(groups))
        return groups

    if queue.remaining < wanted:
        raise ValueError(
            f"an iteration of {wanted} groups needs as many different prompts, and there are {queue.remaining}"
        )
    try:
        draw(wanted + spare)
        while len(accepted) < wanted:
            groups = ranks.gather(generate_and_score)
            if not groups:
                break
            if score_together is not None:
                score_together(flatten(groups))
            for group in groups:
                selected = keep is None or keep(group)
                (accepted if selected else rejected)[group[0].prompt.index] = group
            draw(wanted + spare + len(rejected) - len(drawn))
    finally:
        stream.close()
    if len(accepted) + len(rejected) < min(wanted, len(drawn)):
        raise RuntimeError(
            f"{len(drawn)} groups were asked for, and the engine ended with {len(accepted) + len(rejected)} of them"
        )
    unfinished = [prompt for prompt in drawn if prompt.index not in accepted and prompt.index not in rejected]
    queue.requeue(unfinished)
    in_order = [prompt.index for prompt in drawn]
    kept = [accepted[index] for index in in_order if index in accepted]
    others = [rejected[index] for index in in_order if index in rejected]
    queue.record([*kept, *others])
    rewards = [sample.reward for sample in flatten([*kept, *others]) if sample.reward is not None]
    return CollectedGroups(
        groups=kept + others[: wanted - len(kept)],
        accepted=len(kept),
        sampled=len(kept) + len(others),
        requeued=len(unfinished),
        reward=sum(rewards) / len(rewards) if rewards else math.nan,
        after=queue.after,
    )


def flatten(groups: Sequence[Group]) -> list[Sample]:
    """The samples of groups, group by group."""
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
        """Forget prompts and groups."""
        self._prompts, self._groups = [], []


def sample_all(stream: GroupStream, prompts: Sequence[Prompt]) -> list[Sample]:
    """Return the samples of all prompts, in prompt order, from a new stream; RuntimeError if groups are missing."""
    groups: list[Group] = []
    try:
        stream.submit(prompts)
        while len(groups) < len(prompts):
            finished = stream.collect(len(prompts))
            if not finished:
                raise RuntimeError(f"the engine ended with {len(groups)} of {len(prompts)} groups")
            groups += finished
    finally:
        stream.close()
    order = {id(prompt): place for place, prompt in enumerate(prompts)}
    groups.sort(key=lambda group: order[id(group[0].prompt)])
    return flatten(groups)
