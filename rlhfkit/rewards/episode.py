"""Rewards of episodes: what the environment gave, or any other reward applied to the last turn."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import (
    AnswerReader,
    Reward,
    answer_reader,
    evaluate,
    reward_metrics,
    reward_name,
    tell_progress,
)


class EpisodeReward:
    """The sum of the environment's rewards over all turns, for samples of ``EpisodeEngine`` and ``AgentEngine``.

    ``Sample.token_rewards`` holds the reward of each turn. Inside a ``WeightedSum``, the other parts and the effect of
    a weight other than 1 are credited to the last action.

    Example::

        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), MyEnvironment), reward=EpisodeReward())
    """

    name = "episode"

    def __init__(self, *, truncated: Literal["keep", "mask"] = "keep") -> None:
        """Create the reward.

        Args:
            truncated: Reward of an episode that reached its limit of turns or tokens: ``"keep"``: the sum so far;
                ``"mask"``: ``None`` (it is not trained on).

        Raises:
            ValueError: If ``truncated`` is neither.
        """
        if truncated not in ("keep", "mask"):
            raise ValueError(f"truncated must be 'keep' or 'mask', got {truncated!r}")
        self.truncated = truncated

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the totals; ``None`` for episodes that failed.

        Raises:
            ValueError: If a sample is not an episode.
        """
        return [self._total(sample) for sample in samples]

    def _total(self, sample: Sample) -> float | None:
        if "reward" not in sample.info:
            raise ValueError(
                "EpisodeReward scores samples of EpisodeEngine or AgentEngine, got one of an engine without "
                "environment: give RolloutCallback(engine=EpisodeEngine(...))"
            )
        if self.truncated == "mask" and sample.finish_reason == "length":
            return None
        reward: float | None = sample.info["reward"]
        return reward


class OnLastTurn:
    """Apply another reward to the policy's last turn only.

    The text of a whole episode includes what the environment wrote, in which a reward could find the answer.

    Example::

        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), tools=[calculate]), reward=OnLastTurn(math_match))
    """

    time_bounded: ClassVar[bool] = True
    """No warning for this class: ``evaluate`` warns about the inner reward by its name."""

    def __init__(self, reward: Reward) -> None:
        """Wrap a reward.

        Raises:
            TypeError: If ``reward`` is not callable.
        """
        if not callable(reward):
            raise TypeError(f"reward must be callable on a list of samples, got {type(reward).__name__}")
        self.reward = reward
        self.name = reward_name(reward)

    def inner_rewards(self) -> list[Reward]:
        """Return the inner reward."""
        return [self.reward]

    def metrics(self) -> dict[str, float]:
        """Metrics of the inner reward, see :func:`~rlhfkit.rewards.base.reward_metrics`."""
        return reward_metrics(self.reward)

    def set_progress(self, *, step: int, epoch: int) -> None:
        """Tell the inner reward, if it wants to know."""
        tell_progress(self.reward, step=step, epoch=epoch)

    def answer_reader(self) -> AnswerReader | None:
        """Return that of the inner reward, which reads the last turn."""
        read = answer_reader(self.reward)
        return None if read is None else lambda sample: read(dataclasses.replace(sample, text=_last_text(sample)))

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        """Return the inner reward's values, ``None`` for episodes that failed."""
        judged = [sample for sample in samples if not sample.info.get("failed")]
        seen = [dataclasses.replace(sample, text=_last_text(sample)) for sample in judged]
        values = evaluate({self.name: self.reward}, seen)[self.name] if seen else []
        found = {id(sample): value for sample, value in zip(judged, values, strict=True)}
        return [found.get(id(sample)) for sample in samples]


def _last_text(sample: Sample) -> str:
    if "last_text" not in sample.info:
        return sample.text  # decoded only here
    text: str = sample.info["last_text"]
    return text
