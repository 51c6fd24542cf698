"""``GreedyAnswers``: the reward of a greedy answer to each prompt, which ReMax compares samples with."""

import math

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.rollout.source import Ask
from rlhfkit.data.types import GREEDY_REWARD
from rlhfkit.rank_store import RankLog
from rlhfkit.rollout.collector import CollectedGroups, flatten
from rlhfkit.trainer_parts import policy_of


class GreedyAnswers(RolloutPart):
    """Has the collector sample one more answer for each group that was selected, and score it.

    A ``RolloutCallback`` has it if its module compares samples with greedy answers.
    """

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
