"""``EpisodeGroups``: what group functions share whose samples are episodes."""

import asyncio
import weakref
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.groups import GroupError, GroupFunction, GroupSampler, describe_failure
from rlhfkit.validation import check_integer, check_number


class RunnableEpisode(Protocol):
    """One episode."""

    error: Exception | None
    """The exception that ended the episode early."""

    async def run(self) -> Sample:
        """Run the episode to its end; the sample's ``info`` has ``failed``, ``turns`` and ``ended``."""
        ...


class EpisodeGroups(GroupFunction):
    """A group is as many episodes, run side by side. Subclasses define the episodes.

    Arguments and errors are those of :class:`~rlhfkit.episodes.Episodes`. ``blocked_after``: seconds that one step of
    async code may block the event loop before that is an error.
    """

    in_validation = True
    shortens_answers = True

    def __init__(
        self,
        *,
        max_turns: int,
        max_episode_tokens: int | None,
        episode_timeout: float,
        blocked_after: float,
        concurrency: int | None,
        parallel_calls: int | None,
        on_error: Literal["mask", "raise"],
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        check_integer("max_turns", max_turns, minimum=1)
        check_integer("max_episode_tokens", max_episode_tokens, minimum=2, optional=True)
        check_number("episode_timeout", episode_timeout, above=0, why="it is in seconds")
        check_integer("concurrency", concurrency, minimum=1, optional=True)
        check_integer("parallel_calls", parallel_calls, minimum=1, optional=True)
        if on_error not in ("mask", "raise"):
            raise ValueError(f"on_error must be 'mask' or 'raise', got {on_error!r}")
        self.max_turns = max_turns
        self.max_model_len = max_episode_tokens
        self.episode_timeout = episode_timeout
        self.blocked_after = blocked_after
        self.concurrency = concurrency
        self.parallel_calls = parallel_calls
        self.on_error = on_error
        self.chat_template_kwargs = None if chat_template_kwargs is None else dict(chat_template_kwargs)
        self._slots = _slots_of_loops()

    def episode(self, prompt: Prompt, sample_index: int, sampler: GroupSampler) -> RunnableEpisode:
        """Return the episode of a prompt and an index in its group; abstract."""
        raise NotImplementedError(f"{type(self).__name__} must define episode()")

    async def __call__(self, prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        """Run ``size`` episodes.

        Raises:
            ValueError: If the prompt leaves no room for a completion.
            GroupError: If one failed and ``on_error`` is ``"raise"``.
        """
        sampler.leave_to_branches()
        episodes = [self.episode(prompt, index, sampler) for index in range(size)]
        tasks = [asyncio.ensure_future(self._run(episode, sampler)) for episode in episodes]
        try:
            return sampler.with_texts(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # when one fails, the others are not needed
                task.cancel()

    async def _run(self, episode: RunnableEpisode, sampler: GroupSampler) -> Sample:
        async with self._slot():
            with sampler.branch():
                sample = await episode.run()
        if self.on_error == "raise" and sample.info["failed"]:
            raise GroupError(describe_failure(sample)) from episode.error
        return sample

    def _slot(self) -> asyncio.Semaphore:
        """What an episode holds while it runs, in this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots[loop] = asyncio.Semaphore(self.concurrency or 2**31)
        return self._slots[loop]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without what belongs to a running loop, for ranks in other processes (on Ray)."""
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled object."""
        self.__dict__.update(state, _slots=_slots_of_loops())


def _slots_of_loops() -> "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]":
    return weakref.WeakKeyDictionary()
