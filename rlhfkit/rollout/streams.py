"""Groups of samples as they are finished: ``GroupStream``, and ``BatchedGroupStream`` for engines that have none.

What fills an iteration asks for prompts' groups, takes those that are complete, asks for more, and closes the stream
when it has enough. Whatever is not complete then is dropped.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec


class GroupStream(Protocol):
    """Groups under way."""

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Begin with the groups of these prompts too.

        Args:
            prompts: Each at most once in the life of the stream.
        """
        ...

    def collect(self, most: int) -> list[list[Sample]]:
        """Wait until a group is complete.

        Args:
            most: Groups to give at most; further ones that are complete are given next time.

        Returns:
            Complete groups, at least one, in the order of their prompts; none when no prompt is left.
        """
        ...

    def close(self) -> None:
        """Drop what was not given; a second call does nothing."""
        ...


class StreamingEngine(Protocol):
    """A :class:`~rlhfkit.rollout.engine.RolloutEngine` whose ``can_stream`` is true."""

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> GroupStream:
        """Begin a stream; one at a time.

        Args:
            sampling: How to sample.
            iteration: Goes into each sample's seed.

        Raises:
            RuntimeError: If no weights were loaded yet, or the engine died.
        """
        ...


class BatchedGroupStream:
    """A stream of whatever gives groups all at once: what was submitted since the last round is the next one.

    Args:
        sample: Gives the groups of prompts, in their order.
    """

    def __init__(self, sample: Callable[[list[Prompt]], list[list[Sample]]]) -> None:
        self._sample = sample
        self._prompts: list[Prompt] = []
        self._groups: list[list[Sample]] = []

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """See :class:`GroupStream`."""
        self._prompts += prompts

    def collect(self, most: int) -> list[list[Sample]]:
        """See :class:`GroupStream`."""
        if not self._groups and self._prompts:
            prompts, self._prompts = self._prompts, []
            self._groups = self._sample(prompts)
        given, self._groups = self._groups[:most], self._groups[most:]
        return given

    def close(self) -> None:
        """See :class:`GroupStream`."""
        self._prompts, self._groups = [], []


def sample_all(stream: GroupStream, prompts: Sequence[Prompt]) -> list[Sample]:
    """All groups of a stream, closed afterwards.

    Args:
        stream: A new one.
        prompts: To sample.

    Returns:
        Samples group by group, in the order of the prompts.

    Raises:
        RuntimeError: If groups never came.
    """
    groups: list[list[Sample]] = []
    try:
        stream.submit(prompts)
        while len(groups) < len(prompts):
            given = stream.collect(len(prompts))
            if not given:
                raise RuntimeError(f"the engine ended with {len(groups)} of {len(prompts)} groups")
            groups += given
    finally:
        stream.close()
    order = {id(prompt): place for place, prompt in enumerate(prompts)}
    groups.sort(key=lambda group: order[id(group[0].prompt)])
    return [sample for group in groups for sample in group]
