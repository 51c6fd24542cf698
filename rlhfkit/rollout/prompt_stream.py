"""``PromptStream``: the prompts of a run as one stream, of which groups are started before their iteration begins."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rlhfkit.data.types import Prompt
from rlhfkit.protocols import PromptQueue
from rlhfkit.rollout.collector import Group, GroupStream

_LOOK_SECONDS = 0.5
"""How long an iteration waits for its groups before it looks whether more may be started."""


class PromptStream:
    """Gives iterations their prompts and groups, one iteration after another, while later groups are in flight.

    An iteration is the first accepted groups behind those of the one before, in prompt order, as in a run that takes
    turns. What its prompts are does not depend on what was started: the engine works ahead on the prompts that come
    next, and a group is handed out when its prompt is drawn, be it for the next iteration or in place of a rejected
    one. Of prompt n of a run, rank ``n % world_size`` samples the group, with the seeds of iteration ``n // wanted``;
    that is the iteration which is trained on it if no group is rejected. One thread uses a stream.

    It is the :class:`~rlhfkit.protocols.DrawnPrompts` and the
    :class:`~rlhfkit.rollout.collector.GroupStream` of the iteration that has begun.

    Args:
        open_queue: Opens a queue of prompts; where it begins does not matter.
        wanted: Groups of an iteration, of all ranks.
        rank: This rank.
        world_size: Number of ranks.
        position: Prompts that the run has drawn before the first iteration.
    """

    def __init__(
        self, open_queue: Callable[[], PromptQueue], *, wanted: int, rank: int, world_size: int, position: int
    ) -> None:
        self.position = position
        """Number of the next prompt to be drawn, from 0 at the beginning of the run."""
        self.newest = 0
        """The last iteration of which groups may be started."""
        self._open_queue = open_queue
        self._wanted = wanted
        self._rank = rank
        self._world_size = world_size
        self._stream: GroupStream | None = None
        self._cursor: Any = None  # behind everything that was started
        self._next: Prompt | None = None  # read already, not started
        self._behind: dict[int, None] = {}  # indices of prompts that were started, by any rank, before they are drawn
        self._early: dict[int, Group | None] = {}  # this rank's of these by index; None: not finished
        self._ready: list[Group] = []

    def begin(self, iteration: int, queue: PromptQueue, open_stream: Callable[[], GroupStream]) -> None:
        """Begin an iteration, whose prompts ``queue`` draws."""
        self._iteration, self._queue = iteration, queue
        self._drawn: dict[int, int] = {}  # position by index, of this iteration
        if self._stream is None:
            self._stream = open_stream()

    # ------------------------------------------------------------------ prompts of the iteration

    @property
    def remaining(self) -> int:
        return self._queue.remaining

    def take(self, count: int) -> list[Prompt]:
        """Draw the next prompts; RuntimeError if they are not those that were started."""
        prompts = self._queue.take(count)
        for prompt in prompts:
            started = next(iter(self._behind), prompt.index)
            if started != prompt.index:
                raise RuntimeError(
                    f"prompt {started} was started ahead, and prompt {prompt.index} was drawn: the queue of the "
                    "DataModule must give the same prompts from the same cursor"
                )
            self._behind.pop(prompt.index, None)
            self._drawn[prompt.index] = self.position
            self.position += 1
        if not self._behind:
            self._cursor, self._next = self._queue.cursor, None
        return prompts

    def requeue(self, prompts: Sequence[Prompt]) -> None:
        """Put prompts at the front of the next iteration; there are none, as nothing is drawn that is not decided."""
        self._queue.requeue(prompts)

    def record(self, rewards: Mapping[int, Sequence[float]]) -> None:
        """Remember the rewards of groups, by the index of their prompt, for a curriculum."""
        self._queue.record(rewards)

    @property
    def after(self) -> dict[str, Any]:
        """Where the next iteration begins: what was started for it is drawn then."""
        return self._queue.after

    # ------------------------------------------------------------------ groups of the iteration

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Start the groups of drawn prompts that were not started; the position of a prompt gives its seeds."""
        known = [prompt.index for prompt in prompts if prompt.index in self._early]
        self._send([(self._drawn[prompt.index], prompt) for prompt in prompts if prompt.index not in self._early])
        early = [self._early.pop(index) for index in known]
        self._ready += [group for group in early if group is not None]

    def collect(self, most: int, *, wait: float | None = None) -> list[Group]:
        """Wait for finished groups of this iteration, up to ``wait`` seconds, and start later ones meanwhile."""
        assert self._stream is not None
        deadline = math.inf if wait is None else time.monotonic() + wait
        while True:
            self._start_behind()
            if self._ready:
                given, self._ready = self._ready[:most], self._ready[most:]
                return given
            start = time.monotonic()
            groups = self._stream.collect(most, wait=min(max(deadline - start, 0.0), _LOOK_SECONDS))
            for group in groups:
                index = group[0].prompt.index
                if index in self._early:
                    self._early[index] = group
                else:
                    self._ready.append(group)
            now = time.monotonic()
            if not groups and (now >= deadline or now - start < _LOOK_SECONDS / 2):
                return []

    def close(self) -> None:
        """The iteration has ended; groups of later ones stay in flight. See :meth:`drop`."""

    def drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._behind.clear()
        self._early, self._ready = {}, []

    # ------------------------------------------------------------------ later groups

    def _start_behind(self) -> None:
        """Start as many groups as later iterations need if none is rejected.

        A prompt that this iteration has, or that is started, waits: its place among the next ones depends on which
        iteration draws it, as none has a prompt twice.
        """
        share: list[tuple[int, Prompt]] = []
        while len(self._behind) < (self.newest - self._iteration) * self._wanted:
            if self._next is None:
                queue = self._open_queue()
                queue.cursor = self._cursor
                (self._next,) = queue.take(1)
                self._cursor = queue.cursor
            index, position = self._next.index, self.position + len(self._behind)
            if index in self._drawn or index in self._behind:
                break
            if position % self._world_size == self._rank:
                share.append((position, self._next))
                self._early[index] = None
            self._behind[index] = None
            self._next = None
        self._send(share)

    def _send(self, placed: Sequence[tuple[int, Prompt]]) -> None:
        assert self._stream is not None
        for iteration, prompts in groupby(placed, key=lambda each: each[0] // self._wanted):
            self._stream.submit([prompt for _, prompt in prompts], iteration=iteration)
