"""``Replay``: groups of earlier iterations that a later one is trained on again, and their checkpoints."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, Source
from rlhfkit.data.types import Sample
from rlhfkit.protocols import CorrectsOffPolicy, ExperienceLearner
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.replay_buffer import GroupReplay, ReplayBuffer
from rlhfkit.trainer_parts import learner_of


class Replay(RolloutPart):
    """Groups with a learning signal are kept, and trained on again in place of later groups without one.

    Args:
        buffer: Which groups are kept, and how long.
        group_size: Samples of a group, as saved groups of another size are forgotten; ``None``: any.
        collector: Collects the groups.
        sampling: How the run samples.
    """

    name = "replay"

    def __init__(
        self, buffer: ReplayBuffer, group_size: int | None, *, collector: GroupCollector, sampling: SamplingSpec
    ) -> None:
        self.buffer = buffer
        self.collector = collector
        self.sampling = sampling
        self.groups = GroupReplay(buffer)
        self.group_size = group_size

    def check(self, trainer: L.Trainer) -> None:
        """Have the module correct for the policies that replayed samples are of; ValueError if it cannot."""
        parts = self.collector.reward_parts(trainer)
        check_replay(learner_of(trainer), self.buffer, self.sampling, parts)

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


def check_replay(
    module: ExperienceLearner, buffer: ReplayBuffer, sampling: SamplingSpec, parts: Sequence[str] | None
) -> None:
    """Have a module correct for the policies that replayed samples are of.

    Args:
        module: What learns.
        buffer: What is replayed.
        sampling: How training samples.
        parts: Names of the parts of the reward, if they are known.

    Raises:
        ValueError: If it does not, or the groups are compared by a part that there is not, or have nothing to compare.
    """
    if sampling.group_size == 1:
        raise ValueError(
            "replay_buffer keeps groups whose rewards differ, and with SamplingSpec(group_size=1) none does: raise "
            "group_size, or leave replay_buffer out"
        )
    if parts is not None:
        buffer.check_parts(parts)
    if isinstance(module, CorrectsOffPolicy) and module.correct_off_policy():
        rank_zero_info("Samples are replayed, so the policy learns with truncated weights: correction='tis'.")
    if not module.uses_rollout_logprobs:
        raise ValueError(
            f"replay_buffer trains {type(module).__name__} on samples of earlier policies, for which it has no "
            "importance weights: give it a correction ('tis', 'seq-tis') or a policy_loss that is given the engine's "
            "log-probs ('decoupled_ppo_loss'), or leave replay_buffer out"
        )
