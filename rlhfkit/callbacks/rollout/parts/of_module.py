"""What a module brings to its rollouts: scores of its reward models, early questions to placed ones, greedy answers.

A ``RolloutCallback`` has these parts without being told, if its module needs them.
"""

import math
from collections.abc import Sequence

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.rollout.source import Ask, Source
from rlhfkit.data.types import GREEDY_REWARD, Experience, Sample
from rlhfkit.protocols import AsksWhileSampling
from rlhfkit.rank_store import RankLog
from rlhfkit.rollout.collector import CollectedGroups, Group, flatten
from rlhfkit.trainer_parts import policy_of, prompts_of


class ModelScores(RolloutPart):
    """Scores the samples of an iteration, together on all ranks, in the main thread.

    Selection, and a curriculum that goes by rewards, need the scores while groups are collected: then the collector
    asks for them (:attr:`early`).
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


class AskEarly(RolloutPart):
    """Asks the module's models on machines of their own about groups that are finished, before they are scored.

    Args:
        module: The module that has them.
    """

    def __init__(self, module: AsksWhileSampling) -> None:
        self.module = module

    def check(self, trainer: L.Trainer) -> None:
        self.rollouts.collector.on_finished = self.ask

    def before_collect(self, trainer: L.Trainer, iteration: int) -> None:
        self.module.placed.begin_asking(iteration)

    def ask(self, ask: Ask, groups: Sequence[Group]) -> None:
        """Ask about groups; in any thread."""
        for group in groups:
            temperature = ask.sampling.temperature or 1.0
            rows = Experience.from_samples(group, temperature=temperature, before_rewards=True)
            self.module.placed.ask_early(rows, ask.iteration)

    def after_prepare(self, trainer: L.Trainer, iteration: int) -> None:
        """Note how long this rank has waited for the models, and how long they worked unnoticed."""
        self.rollouts.timing.note(self.module.placed.take_seconds(), iteration)

    def close(self) -> None:
        """End the models, as the module's ``teardown`` does, which Lightning does not call after an error."""
        self.module.placed.close()


class GreedyAnswers(RolloutPart):
    """Has the collector sample and score a greedy answer to each selected prompt, which ReMax compares samples with."""

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if greedy answers cannot be made, scored or named."""
        collector = self.rollouts.collector
        if collector.reward is None or policy_of(trainer).scorer is not None:
            raise ValueError(
                "a module that compares samples with greedy answers (ReMax) needs their rewards while samples are "
                "collected: give RolloutCallback(reward=...), with a ModelReward in place of the module's RewardModel"
            )
        if collector.engine.recorded:
            raise ValueError(
                f"{type(collector.engine).__name__} has no greedy answers, which the module compares samples with "
                "(ReMax): use another engine, or other advantages"
            )
        if GREEDY_REWARD in (collector.reward_parts() or ()):
            raise ValueError(
                f"a part of RolloutCallback(reward=...) is called {GREEDY_REWARD!r}, as the reward of a greedy answer "
                "is (ReMax): give it another name"
            )
        collector.complete = self.add

    def add(self, ask: Ask, collected: CollectedGroups, rank_log: RankLog) -> None:
        """Make the reward of a greedy answer a part of those of each group of this rank."""
        groups, collector = collected.groups, self.rollouts.collector
        if not groups:
            return
        prompts = [collected.drawn[group[0].prompt.index] for group in groups]  # an environment begins them anew
        with collector.timing.record("generate", ask.iteration):
            made = collector.generate(collector.policy_source, prompts, ask.sampling.greedy(), ask.iteration, rank_log)
        answers = flatten(made)
        collector.score(ask.trainer, answers, ask.iteration, rank_log)
        for group, answer in zip(groups, answers, strict=True):
            for sample in group:
                sample.reward_parts[GREEDY_REWARD] = math.nan if answer.reward is None else answer.reward
