"""``Alarm``: a bound on a metric, and what to do when a run crosses it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A metric that should stay within bounds."""

    metric: str
    """Name as logged."""
    low: float | None = None
    """Alarming below this."""
    high: float | None = None
    """Alarming above this."""
    advice: str
    """What it means and what to do."""

    def rings(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the metric is there and out of bounds; a NaN is.

        Args:
            metrics: Numbers or scalar tensors by name.
        """
        if self.metric not in metrics:
            return False
        value = float(metrics[self.metric])
        above, below = self.high is None or value <= self.high, self.low is None or value >= self.low
        return not (above and below)


ROLLOUT_ALARMS = (
    Alarm(
        metric="rollout_corr/logprob_abs_diff_mean",
        high=0.05,
        advice="engine and trainer disagree on the same tokens by more than rounding: run both in one precision, "
        "compare attention implementations, or give the module a correction ('tis', 'icepop')",
    ),
    Alarm(
        metric="rollout_corr/untruncated_eff_sample_size",
        low=0.3,
        advice="few samples carry most of the weight, the policy that sampled is too far away: lower max_staleness or "
        "the learning rate, or give the module a correction ('mis' leaves whole samples out)",
    ),
    Alarm(
        metric="rollout/zero_advantage_fraction",
        high=0.9,
        advice="almost all samples have advantage 0: the task is too hard or too easy, or the reward is constant; try "
        "RolloutCallback(dynamic_sampling=DynamicSampling()) or a larger group_size",
    ),
    Alarm(
        metric="rollout/truncated_fraction",
        high=0.5,
        advice="most samples are cut off at max_new_tokens and judged unfinished: raise "
        "SamplingSpec(max_new_tokens=...)",
    ),
    Alarm(
        metric="rollout/unscored_fraction",
        high=0.1,
        advice="the reward returns None for many samples, which are not trained on: look at what it cannot score",
    ),
)
"""Bounds of ``RolloutCallback``. An effective sample size below 0.3 is verl's alarm; the others are ours."""


class Alarms:
    """Warns of each alarm when it first rings.

    Args:
        alarms: What to look at.
    """

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        self._silent = list(alarms)

    def check(self, metrics: Mapping[str, Any], iteration: int) -> list[Alarm]:
        """Look at an iteration.

        Args:
            metrics: Of the iteration.
            iteration: For the message.

        Returns:
            The alarms that have not rung before.
        """
        ringing = [alarm for alarm in self._silent if alarm.rings(metrics)]
        self._silent = [alarm for alarm in self._silent if alarm not in ringing]
        for alarm in ringing:
            log.warning("iteration %d: %s is %.3g: %s", iteration, alarm.metric, metrics[alarm.metric], alarm.advice)
        return ringing
