"""``Replay``: groups of earlier iterations that a later one is trained on again, and their checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, Source
from rlhfkit.data.types import Sample
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.replay_buffer import GroupReplay, ReplayBuffer


class Replay(RolloutPart):
    """Groups with a learning signal are kept, and trained on again in place of later groups without one.

    Args:
        buffer: Which groups are kept, and how long.
        group_size: Samples of a group, as saved groups of another size are forgotten; ``None``: any.
    """

    name = "replay"

    def __init__(self, buffer: ReplayBuffer, group_size: int | None) -> None:
        self.groups = GroupReplay(buffer)
        self.group_size = group_size

    def wrap(self, source: Source) -> Source:
        """Replay groups in place of some that the source gives."""
        return _Replayed(source, self.groups)

    def clear(self) -> None:
        """Forget all groups: versions of another run say nothing here, nor do its prompts' numbers."""
        self.groups.clear()

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Return what was replayed."""
        return self.groups.metrics

    @property
    def replaced(self) -> Sequence[Sample]:
        """Samples of this rank in whose place others were replayed."""
        return self.groups.replaced

    def state_dict(self, next_iteration: int) -> Any:
        """The groups that this rank keeps."""
        return self.groups.state_dict()

    def load_state_dict(self, own: Iterable[Any], states: Iterable[Any], *, rank: int, world_size: int) -> None:
        """Keep saved groups."""
        self.groups.load_state_dict(states, group_size=self.group_size)


class _Replayed:
    def __init__(self, source: Source, groups: GroupReplay) -> None:
        self._source = source
        self._groups = groups

    def collect(self, ask: Ask) -> CollectedGroups:
        collected = self._source.collect(ask)
        version, seed = ask.trainer.global_step, ask.sampling.seed
        return self._groups.replay(collected, iteration=ask.iteration, version=version, seed=seed)
