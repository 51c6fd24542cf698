"""``ModelScores``: scores of the module's own reward models are added to the rewards of samples."""

from collections.abc import Sequence

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.rollout.source import Ask, Source
from rlhfkit.data.types import Experience, Sample
from rlhfkit.rollout.collector import CollectedGroups, flatten
from rlhfkit.trainer_parts import policy_of, prompts_of


class ModelScores(RolloutPart):
    """Scores the samples of an iteration, together on all ranks, in the main thread.

    Selection, and a curriculum that goes by rewards, need the scores while groups are collected: then the collector
    asks for them (:attr:`early`). A ``RolloutCallback`` has it if its module has reward models.
    """

    def __init__(self) -> None:
        self.early = False
        """Whether the scores are needed while groups are collected."""

    def setup(self, trainer: L.Trainer) -> None:
        """Say what the scores are called, and keep the name from other parts of rewards."""
        collector = self.rollouts.collector
        collector.more_parts, collector.check_scored = ("model",), check_names

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if a thread beside training would use the module, or ranks cannot score together."""
        collector = self.rollouts.collector
        self.early = collector.keep is not None or prompts_of(trainer).curriculum_uses_rewards
        collector.score_together = self.add_scores if self.early else None
        if self.rollouts.overlaps and self.early:
            raise ValueError(
                "DynamicSampling, and an order of prompts that goes by rewards, need the scores of the module's "
                "RewardModel while samples are made. With Ahead that is in a thread beside training, which must not "
                "use the module: give the callback a ModelReward in place of RewardModel, or leave Ahead out"
            )
        if collector.spare_share and self.early and trainer.world_size > 1:
            raise ValueError(
                f"Oversampling({collector.spare_share:g}) takes the groups that are finished first on any rank, "
                f"and all {trainer.world_size} ranks together score them with the module's RewardModel: give the "
                "callback a ModelReward in place of RewardModel, or leave Oversampling out"
            )

    def wrap(self, source: Source) -> Source:
        if self.early:
            return source
        self._source = source
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        collected = self._source.collect(ask)
        self.add_scores(ask.trainer, flatten(collected.groups), ask.iteration)
        return collected

    def add_scores(self, trainer: L.Trainer, samples: Sequence[Sample], iteration: int) -> None:
        """Add the scores to the rewards, and as ``model`` to the parts, in place.

        A collective, for the main thread; each rank has samples of its own, or none. A sample without a reward keeps
        none.
        """
        if not samples and trainer.world_size == 1:
            return
        with self.rollouts.timing.record("score", iteration):
            # A model that reads text finds the answer by the mask, also that of a sample without a reward.
            experience = Experience.from_samples(samples, before_rewards=True) if samples else None
            scorer = policy_of(trainer).scorer
            assert scorer is not None
            parts = scorer.parts_of(experience)
            columns = {name: values.tolist() for name, values in parts.items()}
        for number, sample in enumerate(samples):
            sample.reward_parts.update({name: values[number] for name, values in columns.items()})
            if sample.reward is not None:
                sample.reward += columns["model"][number]


def check_names(samples: Sequence[Sample]) -> None:
    """Raise ValueError if samples have a score of this name already."""
    if any("model" in sample.reward_parts for sample in samples):
        raise ValueError(
            "a part of RolloutCallback(reward=...) is called 'model', as the score of the module's RewardModel "
            "is: give it another name"
        )
