"""Rewards of episodes: what the environment gave, and any other reward on what the policy said last."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import Reward, evaluate, reward_metrics, reward_name


class EpisodeReward:
    """What the environment gave in all turns together, for samples of ``EpisodeEngine`` and ``AgentEngine``.

    ``Sample.token_rewards`` says which turn earned how much of it. Inside a ``WeightedSum`` the other parts, and what a
    weight other than 1 takes off, count at the last action.

    Example::

        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), MyEnvironment), reward=EpisodeReward())
    """

    name = "episode"

    def __init__(self, *, truncated: Literal["keep", "mask"] = "keep") -> None:
        """Choose.

        Args:
            truncated: What an episode counts that ended for want of turns or tokens: what it has earned so far, or
                nothing (it is not trained on).

        Raises:
            ValueError: If it is neither.
        """
        if truncated not in ("keep", "mask"):
            raise ValueError(f"truncated must be 'keep' or 'mask', got {truncated!r}")
        self.truncated = truncated

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Totals; ``None`` for episodes that failed.

        Raises:
            ValueError: If a sample is no episode.
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
        return sample.info["reward"]


class OnLastTurn:
    """Another reward, which sees the policy's last turn as the completion.

    The text of a whole episode has the environment's words in it, in which an answer may be found that the policy has
    not given.

    Example::

        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), tools=[calculate]), reward=OnLastTurn(math_match))
    """

    bounded: ClassVar[bool] = True
    """The reward inside is watched, under its own name."""

    def __init__(self, reward: Reward) -> None:
        """Wrap.

        Args:
            reward: Any.

        Raises:
            TypeError: If it cannot be called.
        """
        if not callable(reward):
            raise TypeError(f"reward must be callable on a list of samples, got {type(reward).__name__}")
        self.reward = reward
        self.name = reward_name(reward)

    def metrics(self) -> dict[str, float]:
        """Those of the reward, see :func:`~rlhfkit.rewards.base.reward_metrics`."""
        return reward_metrics(self.reward)

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        """What the reward gives, ``None`` for episodes that failed; its parts are kept."""
        judged = [sample for sample in samples if not sample.info.get("failed")]
        seen = [dataclasses.replace(sample, text=sample.info.get("last_text", sample.text)) for sample in judged]
        values = evaluate({self.name: self.reward}, seen)[self.name] if seen else []
        found = {id(sample): value for sample, value in zip(judged, values, strict=True)}
        return [found.get(id(sample)) for sample in samples]
