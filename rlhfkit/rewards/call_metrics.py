"""What rewards that run in other processes have in common: metrics of their calls, and what they pass on."""

import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import (
    AnswerReader,
    CompositeReward,
    OnFailure,
    Reward,
    answer_reader,
    check_on_failure,
    mean_metrics,
    part_names,
    reward_name,
)
from rlhfkit.rewards.sandbox.process import CallResult


class CallMetrics:
    """Count calls, from any thread, until :meth:`take`; ``name`` is the prefix of each metric."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._outcomes: list[tuple[str, float]] = []
        self._own: list[Mapping[str, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the counts."""
        return CallMetrics, (self.name,)

    def add(self, outcome: CallResult, own: Mapping[str, float] | None = None) -> None:
        """Count one call, and keep the reward's ``own`` metrics of it."""
        with self._lock:
            self._outcomes.append((outcome.status, outcome.seconds))
            self._own += [own] if own else []

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call of this method; empty if nothing was counted.

        The reward's own, averaged over calls; ``<name>/timeout_fraction``, ``<name>/failed_fraction`` (timeouts
        included), and the quantiles ``<name>/seconds_p50`` and ``<name>/seconds_p99``.
        """
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
            own, self._own = self._own, []
        if not outcomes:
            return {}
        seconds = torch.tensor([seconds for _, seconds in outcomes], dtype=torch.float64)
        count = len(outcomes)
        return mean_metrics(own) | {
            f"{self.name}/timeout_fraction": sum(status == "timeout" for status, _ in outcomes) / count,
            f"{self.name}/failed_fraction": sum(status != "ok" for status, _ in outcomes) / count,
            f"{self.name}/seconds_p50": float(seconds.quantile(0.5)),
            f"{self.name}/seconds_p99": float(seconds.quantile(0.99)),
        }


class RewardElsewhere:
    """A reward that runs in other processes; what it is here: its parts, its metrics, its progress and its answers.

    Args:
        reward: What runs there; of a reward that is given by its name only, parts and answers are not known.
        on_failure: What happens to the samples of a call that failed.
        name: Name in logs; ``None``: the reward's.
        calls: Added to the name in metrics of the calls.

    Raises:
        ValueError: If ``on_failure`` is invalid.
    """

    time_bounded: ClassVar[bool] = True
    """Every call returns in time."""

    def __init__(self, reward: str | Reward, on_failure: OnFailure, *, name: str | None, calls: str = "") -> None:
        self.reward = reward
        self.on_failure = check_on_failure(on_failure)
        self.name = name or (reward.rpartition(".")[2] if isinstance(reward, str) else reward_name(reward))
        self._calls = CallMetrics(self.name + calls)
        self._progress: dict[str, int] | None = None
        if isinstance(reward, CompositeReward):  # only then is this a CompositeReward too
            self.part_names = partial(part_names, reward)

    def inner_rewards(self) -> list[Any]:
        """Return the reward, which runs in the processes; none if it was given by name."""
        return [] if isinstance(self.reward, str) else [self.reward]

    def answer_reader(self) -> AnswerReader | None:
        """Return that of the reward; it reads in this process."""
        return answer_reader(self.reward)

    def set_progress(self, *, step: int, epoch: int) -> None:
        """Tell the reward in the processes, if it wants to know, with the next samples."""
        self._progress = {"step": step, "epoch": epoch}

    def metrics(self) -> dict[str, float]:
        """The reward's own metrics and those of the calls since this was last called, see :class:`CallMetrics`."""
        return self._calls.take()

    def set_parts(self, samples: Sequence[Sample], parts: Sequence[Mapping[str, float]] | None) -> None:
        """Set ``reward_parts`` where the reward sets them; ``None``: the call failed, and they are missing (NaN)."""
        if not isinstance(self, CompositeReward):
            return
        missing = dict.fromkeys(self.part_names() or (), math.nan)
        for sample, found in zip(samples, parts if parts is not None else [missing] * len(samples), strict=True):
            sample.reward_parts |= found
