"""``Alarm``: a bound on a metric, with advice that is logged when a run crosses it."""

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.validation import check_number

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Bounds on a metric, and advice."""

    metric: str
    """Name under which it is logged."""
    low: float | None = None
    """Lowest value without an alarm; ``None``: no bound."""
    high: float | None = None
    """Highest value without an alarm; ``None``: no bound."""
    advice: str
    """What the value means and what to do."""

    def __post_init__(self) -> None:
        check_number("Alarm.low", self.low, optional=True)
        check_number("Alarm.high", self.high, optional=True)

    def is_triggered(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the metric (a number or scalar tensor) is logged and out of bounds; NaN is out of bounds."""
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
        "compare attention implementations, or give the module a correction ('tis', 'icepop'). With Ahead it counts "
        "too what the policy has learned since",
    ),
    Alarm(
        metric="rollout_corr/untruncated_eff_sample_size",
        low=0.3,
        advice="few samples carry most of the weight, the policy that sampled is too far away: lower "
        "Ahead(max_staleness=...) or the learning rate, or give the module a correction ('mis' masks whole samples)",
    ),
    Alarm(
        metric="rollout/zero_advantage_fraction",
        high=0.9,
        advice="almost all samples have advantage 0: the task is too hard or too easy, or the reward is constant; try "
        "RolloutCallback(parts=[DynamicSampling()]) or a larger group_size",
    ),
    Alarm(
        metric="rollout/truncated_fraction",
        high=0.5,
        advice="most samples are cut off at max_new_tokens and scored unfinished: raise "
        "SamplingSpec(max_new_tokens=...)",
    ),
    Alarm(
        metric="rollout/unscored_fraction",
        high=0.1,
        advice="the reward returns None for many samples, which are not trained on: check what it cannot score",
    ),
)
"""Bounds of every run. An effective sample size below 0.3 is verl's alarm; the others are ours."""
_OF_NOTHING = (
    "there is nothing to compute it of: no token was trained on (look at what masks samples), or the engine gives no "
    "log-probs"
)


class Alarms(RolloutPart):
    """Logs the advice of each alarm once, when it is first triggered.

    After the first iteration it also warns of alarms on metrics that were not logged; not of our own, whose metrics not
    every run has. A ``RolloutCallback`` has our own by default.

    Args:
        alarms: Bounds on metrics, each with advice; a mapping has the fields of an :class:`Alarm`. ``None``:
            ``ROLLOUT_ALARMS``; an empty list: none.
    """

    def __init__(self, alarms: Sequence[Alarm | Mapping[str, Any]] | None = None) -> None:
        self.alarms = ROLLOUT_ALARMS if alarms is None else tuple(_made(one) for one in alarms)
        self.triggered: list[tuple[int, Alarm, float]] = []
        """The alarms of the run so far: iteration, alarm, and value of the metric."""
        self._quiet = list(self.alarms)
        self._unheard = [alarm.metric for alarm in self.alarms if alarm not in ROLLOUT_ALARMS]

    def logged(self, trainer: L.Trainer, iteration: int) -> None:
        metrics = trainer.callback_metrics  # exchanged between ranks, so every rank asks for them
        if trainer.is_global_zero:
            self.check_metrics(metrics, iteration)

    def check_metrics(self, metrics: Mapping[str, Any], iteration: int) -> list[Alarm]:
        """Check the metrics of an iteration and return the alarms that are triggered for the first time."""
        for name in dict.fromkeys(self._unheard):
            if name not in metrics:
                near = ", ".join(difflib.get_close_matches(name, list(metrics), n=3)) or ", ".join(sorted(metrics))
                log.warning(
                    "an alarm on %s has nothing to check: iteration %d logged no such metric; near it are %s",
                    name,
                    iteration,
                    near,
                )
        self._unheard = []
        triggered = [alarm for alarm in self._quiet if alarm.is_triggered(metrics)]
        self._quiet = [alarm for alarm in self._quiet if alarm not in triggered]
        self.triggered += [(iteration, alarm, float(metrics[alarm.metric])) for alarm in triggered]
        for alarm in triggered:
            value = float(metrics[alarm.metric])
            advice = _OF_NOTHING if math.isnan(value) and alarm in ROLLOUT_ALARMS else alarm.advice
            log.warning("iteration %d: %s is %.3g: %s", iteration, alarm.metric, value, advice)
        return triggered


def _made(alarm: Alarm | Mapping[str, Any]) -> Alarm:
    return alarm if isinstance(alarm, Alarm) else Alarm(**alarm)
