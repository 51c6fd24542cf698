"""Rewards made of others: weighted sums, the last turn of an episode, answers by length; the environment's reward."""

import dataclasses
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import (
    TIMEOUT,
    AnswerReader,
    Reward,
    RewardWrapper,
    check_is_reward,
    evaluate,
    reward_metrics,
    reward_name,
)
from rlhfkit.validation import check_integer, check_number

Normalization = Callable[..., Tensor]
"""A function of a part's values, (B,), NaN where missing, and group ids, (B,), given as ``group=``, that returns
values, (B,)."""


class WeightedSum(RewardWrapper):
    """The weighted sum of named rewards; each part is logged by name, before weighting.

    Example::

        WeightedSum({"correct": (exact_match, 1.0), "format": (FormatReward(r"<answer>.*</answer>"), 0.2)})
        WeightedSum(correct=exact_match, format=(FormatReward(r"<answer>.*</answer>"), 0.2))  # weight 1 when left out
        WeightedSum(judge=ModelReward("judge"), style=ModelReward("style"), normalize=group_advantages)
    """

    def __init__(
        self,
        parts: Mapping[str, Reward | tuple[Reward, float]] | None = None,
        *,
        missing: Literal["none", "skip"] = "none",
        normalize: Normalization | None = None,
        timeout: float = TIMEOUT,
        **more: Any,
    ) -> None:
        """Create the reward.

        Args:
            parts: Name to ``(reward, weight)``, or to a reward with weight 1.
            missing: Effect of a ``None`` in a part: ``"none"``: the total is ``None`` too; ``"skip"``: the part is left
                out of the sum (a sample without any part gets ``None`` either way).
            normalize: Applied to the values of each part before weighting; ``None``: no normalisation.
                :func:`~rlhfkit.losses.group_advantages` gives each part mean 0 and standard deviation 1 within the
                samples of a prompt; with ``GRPOModule(advantage_scale="batch")`` that is GDPO (Liu et al., 2026,
                arXiv:2601.05242). Values of a prompt with a single sample, as in greedy validation, are not normalised.
            timeout: Time limit of each async part in seconds.
            **more: Further parts.

        Raises:
            ValueError: If there is no part, or a weight is not finite.
            TypeError: If a part cannot be called.
        """
        if parts is not None and not isinstance(parts, Mapping):
            raise TypeError(f"give each part a name, WeightedSum(right=..., style=(..., 0.3)); got {parts!r:.200}")
        self.rewards: dict[str, Reward] = {}
        self.weights: dict[str, float] = {}
        for name, part in {**(parts or {}), **more}.items():
            reward, weight = part if isinstance(part, tuple | list) and len(part) == 2 else (part, 1.0)
            if not callable(reward):
                raise TypeError(f"part {name!r} must be a callable or (callable, weight), got {part!r}")
            check_is_reward(f"part {name!r}", reward)
            check_number(f"the weight of part {name!r}", weight)
            self.rewards[name], self.weights[name] = cast(Reward, reward), float(weight)
        if not self.rewards:
            raise ValueError("WeightedSum needs at least one part")
        check_number("timeout", timeout, above=0, why="it is in seconds")
        if missing not in ("none", "skip"):
            raise ValueError(f"missing must be 'none' or 'skip', got {missing!r}")
        if normalize is not None and not callable(normalize):
            raise TypeError(f"normalize must be a function of values and group ids, got {normalize!r}")
        names = [] if normalize is None else [*inspect.signature(normalize).parameters]
        if normalize is not None and "group" not in names[1:]:
            raise TypeError(
                f"normalize takes ({', '.join(names)}); needed is a function (values, group), which is given the ids "
                "of groups by that name"
            )
        self.missing = missing
        self.normalize = normalize
        self.timeout = timeout

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Return the totals, and set ``reward_parts`` to the values before normalisation and weighting.

        Raises:
            ValueError: If a part returns wrong values, see :func:`~rlhfkit.rewards.base.score_samples`, or
                ``normalize`` returns another shape.
            TimeoutError: If an async part takes longer than ``timeout``.
        """
        values = evaluate(self.rewards, samples, timeout=self.timeout)
        for name, column in values.items():
            for sample, value in zip(samples, column, strict=True):
                sample.reward_parts[name] = math.nan if value is None else value
        if self.normalize is not None:
            values = {name: self._normalized(name, column, samples) for name, column in values.items()}
        return [self._total([values[name][row] for name in values]) for row in range(len(samples))]

    def part_names(self) -> list[str]:
        """Names of the parts, in the order given."""
        return list(self.rewards)

    def inner_rewards(self) -> list[Reward]:
        """Return the parts."""
        return list(self.rewards.values())

    def metrics(self) -> dict[str, float]:
        """Metrics of all parts, see :func:`~rlhfkit.rewards.base.reward_metrics`.

        ``<part>/`` stands before those of parts whose rewards have one name, and before metrics of one name.
        """
        found = {part: reward_metrics(reward) for part, reward in self.rewards.items()}
        rewards = Counter(map(reward_name, self.rewards.values()))
        names = Counter(name for metrics in found.values() for name in metrics)
        return {
            name if rewards[reward_name(self.rewards[part])] == names[name] == 1 else f"{part}/{name}": value
            for part, metrics in found.items()
            for name, value in metrics.items()
        }

    def _normalized(self, name: str, column: list[float | None], samples: Sequence[Sample]) -> list[float | None]:
        """Normalise a part's values for prompts with several samples; missing values stay missing."""
        assert self.normalize is not None
        group = torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64)
        _, place, members = torch.unique(group, return_inverse=True, return_counts=True)
        given = torch.tensor([math.nan if value is None else value for value in column], dtype=torch.float64)
        changed = self.normalize(given, group=group)
        if changed.shape != given.shape:
            raise ValueError(f"normalize returned shape {tuple(changed.shape)} for the {len(given)} values of {name!r}")
        kept = torch.where(members[place] == 1, given, changed.to(given.dtype)).tolist()
        return [None if value is None else new for value, new in zip(column, kept, strict=True)]

    def _total(self, parts: Sequence[float | None]) -> float | None:
        terms = [weight * part for weight, part in zip(self.weights.values(), parts, strict=True) if part is not None]
        if not terms or (len(terms) < len(parts) and self.missing == "none"):
            return None
        return math.fsum(terms)


class CosineLength(RewardWrapper):
    """A reward by correctness and length: short right answers and long wrong ones are better (Yeo et al., 2025).

    arXiv:2502.03373, section 4: with ``n`` the tokens of the completion, ``L`` the limit, and ``(a, b)`` the two values
    of right or of wrong answers::

        b + (a - b) (1 + cos(π n / L)) / 2   n < L
        at_limit                             n >= L

    Defaults are the paper's. Open R1's and TRL's cosine reward has ``(1, 0.5)`` for right answers, ``(-1, -0.5)`` for
    wrong ones, and no value of its own at the limit.

    Example::

        CosineLength(math_match, max_length=14336)
    """

    def __init__(
        self,
        correct: Reward,
        max_length: int,
        *,
        correct_short: float = 2.0,
        correct_long: float = 1.0,
        wrong_short: float = -10.0,
        wrong_long: float = 0.0,
        at_limit: float | None = -10.0,
        success_threshold: float = 1.0,
        timeout: float = TIMEOUT,
    ) -> None:
        """Set the values.

        Args:
            correct: The reward that tells whether a completion is right; its metrics are logged too.
            max_length: ``L`` in tokens; the sampling limit ``max_new_tokens`` or less.
            correct_short: Of a right answer of length 0.
            correct_long: Of a right answer of length ``L``.
            wrong_short: Of a wrong answer of length 0.
            wrong_long: Of a wrong answer of length ``L``.
            at_limit: Of a completion of ``L`` tokens or more; ``None``: the values at ``L``.
            success_threshold: A completion with at least this reward is right.
            timeout: Time limit of ``correct`` in seconds, if it is async.

        Raises:
            TypeError: If ``correct`` cannot be called.
            ValueError: If a number is out of range.
        """
        check_is_reward("correct", correct)
        check_integer("max_length", max_length, minimum=1)
        values = {"correct_short": correct_short, "correct_long": correct_long, "wrong_short": wrong_short}
        for name, value in {**values, "wrong_long": wrong_long, "success_threshold": success_threshold}.items():
            check_number(name, value)
        check_number("at_limit", at_limit, optional=True)
        check_number("timeout", timeout, above=0, why="it is in seconds")
        self.reward = correct
        self.max_length = max_length
        self.correct_values = (correct_short, correct_long)
        self.wrong_values = (wrong_short, wrong_long)
        self.at_limit = at_limit
        self.success_threshold = success_threshold
        self.timeout = timeout

    def inner_rewards(self) -> list[Reward]:
        """Return ``correct``."""
        return [self.reward]

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """Score samples; ``None`` where ``correct`` gives none."""
        name = reward_name(self.reward)
        found = evaluate({name: self.reward}, samples, timeout=self.timeout)[name]
        return [None if value is None else self._value(value, one) for value, one in zip(found, samples, strict=True)]

    def _value(self, value: float, sample: Sample) -> float:
        length = sample.num_action_tokens
        if length >= self.max_length and self.at_limit is not None:
            return self.at_limit
        short, long = self.correct_values if value >= self.success_threshold else self.wrong_values
        share = min(length / self.max_length, 1.0)
        return long + (short - long) * (1 + math.cos(math.pi * share)) / 2


class LastTurnReward(RewardWrapper):
    """Apply another reward to the policy's last turn only.

    The text of a whole episode includes what the environment wrote, in which a reward could find the answer.

    Example::

        RolloutCallback(engine=VLLMPool(2), group=Episodes(tools=[calculate]), reward=LastTurnReward(math_match))
    """

    def __init__(self, reward: Reward) -> None:
        """Wrap a reward.

        Raises:
            TypeError: If ``reward`` is not callable.
        """
        check_is_reward("reward", reward)
        self.reward = reward
        self.name = reward_name(reward)

    def inner_rewards(self) -> list[Reward]:
        """Return the reward of the last turn."""
        return [self.reward]

    def answer_reader(self) -> AnswerReader | None:
        """Return that of the inner reward, which reads the last turn."""
        read = super().answer_reader()
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


class EnvironmentReward:
    """The sum of the environment's rewards over all turns, for samples of ``Episodes`` and ``AgentEpisodes``.

    ``Sample.token_rewards`` holds the reward of each turn. Inside a ``WeightedSum``, the other parts and the effect of
    a weight other than 1 are credited to the last action.

    Example::

        RolloutCallback(engine=VLLMPool(2), group=Episodes(MyEnvironment), reward=EnvironmentReward())
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
                "EnvironmentReward scores samples of Episodes or AgentEpisodes, got one of an engine without "
                "environment: give RolloutCallback(group=Episodes(...))"
            )
        if self.truncated == "mask" and sample.finish_reason == "length":
            return None
        reward: float | None = sample.info["reward"]
        return reward
