"""``Selection``: groups are accepted or rejected by a rule, and rejected ones replaced by those of further prompts."""

import logging
from collections.abc import Mapping

import lightning as L

from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, Source
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.dynamic_sampling import DynamicSampling

log = logging.getLogger(__name__)


class Selection(RolloutPart):
    """Has the collector select by ``RolloutCallback(dynamic_sampling=DynamicSampling(...))``."""

    def __init__(self, collector: GroupCollector, rule: DynamicSampling) -> None:
        self.collector = collector
        self.rule = rule
        collector.keep, collector.max_rounds = rule.accepts, rule.max_rounds

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if groups are compared by a reward part that there is not."""
        parts = self.collector.reward_parts(trainer)
        if parts is not None:
            self.rule.check_parts(parts)

    def wrap(self, source: Source) -> Source:
        """Look at what was collected."""
        self._source = source
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        """Warn if too few groups were accepted."""
        collected = self._source.collect(ask)
        if collected.accepted < ask.wanted and ask.trainer.global_rank == 0:
            log.warning(
                "iteration %d: dynamic_sampling accepted only %d of the %d groups that are needed, of %d that were "
                "sampled; the rest is filled with rejected groups",
                *(ask.iteration, collected.accepted, ask.wanted, collected.sampled),
            )
        return collected

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        """Return the share of groups that were accepted, and the mean reward of all."""
        collected = shared.collected
        return {
            "rollout/accepted_fraction": collected.accepted / max(collected.sampled, 1),
            "rollout/reward_before_selection": collected.reward,
        }
