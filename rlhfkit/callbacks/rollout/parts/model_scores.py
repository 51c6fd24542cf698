"""``ModelScores``: scores of the module's own reward models are added to the rewards of samples."""

from collections.abc import Sequence

import lightning as L

from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, Source
from rlhfkit.data.types import Experience, Sample
from rlhfkit.rollout.collector import CollectedGroups, flatten
from rlhfkit.trainer_parts import policy_of, prompts_of


class ModelScores(RolloutPart):
    """Scores the samples of an iteration, together on all ranks, in the main thread.

    Selection, and a curriculum that goes by rewards, need the scores while groups are collected: then the collector
    asks for them (:attr:`early`).

    Args:
        collector: Collects the groups.
        in_thread: Whether it does so in a thread beside training.
    """

    def __init__(self, collector: GroupCollector, *, in_thread: bool) -> None:
        self.collector = collector
        self.in_thread = in_thread
        self.early = False
        """Whether the scores are needed while groups are collected."""

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if a thread beside training would use the module, or ranks cannot score together."""
        self.early = self.collector.keep is not None or prompts_of(trainer).curriculum_uses_rewards
        self.collector.scores_early = self if self.early else None
        if self.in_thread and self.early:
            raise ValueError(
                "dynamic_sampling, and an order of prompts that goes by rewards, need the scores of the module's "
                "reward_model while samples are made. With max_staleness that is in a thread beside training, which "
                "must not use the module: give the callback a ModelReward in place of reward_model, or max_staleness=0"
            )
        if self.collector.spare_share and self.early and trainer.world_size > 1:
            raise ValueError(
                f"Oversampling({self.collector.spare_share:g}) takes the groups that are finished first on any rank, "
                f"and all {trainer.world_size} ranks together score them with the module's reward_model: give the "
                "callback a ModelReward in place of reward_model, or leave Oversampling out"
            )

    def wrap(self, source: Source) -> Source:
        """Score what the source gives."""
        return source if self.early else _Scored(source, self)

    def add(self, trainer: L.Trainer, samples: Sequence[Sample], iteration: int) -> None:
        """Add the scores to the rewards, and as ``model`` to the parts, in place.

        A collective, for the main thread; each rank has samples of its own, or none. A sample without a reward keeps
        none.
        """
        if not samples and trainer.world_size == 1:
            return
        with self.collector.timing.record("score", iteration):
            # A model that reads text finds the answer by the mask, also that of a sample without a reward.
            experience = Experience.from_samples(samples, before_rewards=True) if samples else None
            parts = policy_of(trainer).reward_model_parts(experience)
            columns = {name: values.tolist() for name, values in parts.items()}
        for number, sample in enumerate(samples):
            sample.reward_parts.update({name: values[number] for name, values in columns.items()})
            if sample.reward is not None:
                sample.reward += columns["model"][number]


class _Scored:
    def __init__(self, source: Source, scores: ModelScores) -> None:
        self._source = source
        self._scores = scores

    def collect(self, ask: Ask) -> CollectedGroups:
        collected = self._source.collect(ask)
        self._scores.add(ask.trainer, flatten(collected.groups), ask.iteration)
        return collected
