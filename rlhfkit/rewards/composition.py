"""The weighted sum of several rewards, each normalised on its own if asked."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from rlhfkit.data.types import Sample
from rlhfkit.rewards.base import TIMEOUT, Reward, evaluate, reward_metrics
from rlhfkit.validation import check_number

Normalization = Callable[[Tensor, Tensor], Tensor]
"""Function of a part's values (B,), NaN where missing, and group ids (B,) to values (B,)."""


class WeightedSum:
    """The weighted sum of named rewards; each part is logged by its name, before weighting.

    Example::

        WeightedSum({"correct": (exact_match, 1.0), "format": (FormatReward(r"<answer>.*</answer>"), 0.2)})
        WeightedSum(correct=exact_match, format=(FormatReward(r"<answer>.*</answer>"), 0.2))  # weight 1 when left out
        WeightedSum(judge=ModelReward("judge"), style=ModelReward("style"), normalize=group_advantages)
    """

    composed: ClassVar[bool] = True
    """It sets ``reward_parts`` itself."""

    def __init__(
        self,
        parts: Mapping[str, Reward | tuple[Reward, float]] | None = None,
        *,
        missing: Literal["none", "skip"] = "none",
        normalize: Normalization | None = None,
        timeout: float = TIMEOUT,
        **more: Any,
    ) -> None:
        """Name the parts.

        Args:
            parts: Name to ``(reward, weight)``, or to a reward, whose weight is then 1.
            missing: What a ``None`` in a part does: ``"none"`` makes the sample's total ``None`` too, ``"skip"`` leaves
                the part out of the sum (a sample without any part is ``None`` either way).
            normalize: Applied to the values of each part before they are weighted, so that a part of large numbers
                does not drown the others: :func:`~rlhfkit.losses.group_advantages` makes each part mean 0 and deviation
                1 in the samples of a prompt. With ``GRPOModule(advantage_scale="batch")`` that is GDPO (Liu et al.,
                2026, arXiv:2601.05242). A prompt with a single sample has nothing to be compared with and keeps its
                values, as in greedy validation. ``None``: values as they are.
            timeout: Seconds that each async part may take.
            **more: Further parts.

        Raises:
            ValueError: If there is no part, or a weight is not finite.
            TypeError: If a part cannot be called.
        """
        self.rewards: dict[str, Reward] = {}
        self.weights: dict[str, float] = {}
        for name, part in {**(parts or {}), **more}.items():
            reward, weight = part if isinstance(part, tuple | list) else (part, 1.0)
            if not callable(reward):
                raise TypeError(f"part {name!r} must be a callable or (callable, weight), got {part!r}")
            check_number(f"the weight of part {name!r}", weight)
            self.rewards[name], self.weights[name] = cast(Reward, reward), float(weight)
        if not self.rewards:
            raise ValueError("WeightedSum needs at least one part")
        check_number("timeout", timeout, above=0, why="it is in seconds")
        if missing not in ("none", "skip"):
            raise ValueError(f"missing must be 'none' or 'skip', got {missing!r}")
        if normalize is not None and not callable(normalize):
            raise TypeError(f"normalize must be a function of values and group ids, got {normalize!r}")
        self.missing = missing
        self.normalize = normalize
        self.timeout = timeout

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """The totals; the parts, as they were before normalisation and weights, are left in ``reward_parts``.

        Raises:
            ValueError: See :func:`~rlhfkit.rewards.base.score_samples`; or ``normalize`` returned another shape.
            TimeoutError: See :func:`~rlhfkit.rewards.base.score_samples`.
        """
        values = evaluate(self.rewards, samples, timeout=self.timeout)
        for name, column in values.items():
            for sample, value in zip(samples, column, strict=True):
                sample.reward_parts[name] = math.nan if value is None else value
        if self.normalize is not None:
            values = {name: self._normalized(name, column, samples) for name, column in values.items()}
        return [self._total([values[name][row] for name in values]) for row in range(len(samples))]

    def metrics(self) -> dict[str, float]:
        """Metrics of all parts, see :func:`~rlhfkit.rewards.base.reward_metrics`."""
        return {name: value for reward in self.rewards.values() for name, value in reward_metrics(reward).items()}

    def _normalized(self, name: str, column: list[float | None], samples: Sequence[Sample]) -> list[float | None]:
        """A part's values, normalised where a prompt has several samples; missing ones stay missing."""
        assert self.normalize is not None
        group = torch.tensor([sample.prompt.index for sample in samples], dtype=torch.int64)
        _, place, members = group.unique(return_inverse=True, return_counts=True)
        given = torch.tensor([math.nan if value is None else value for value in column], dtype=torch.float64)
        changed = self.normalize(given, group)
        if changed.shape != given.shape:
            raise ValueError(f"normalize returned shape {tuple(changed.shape)} for the {len(given)} values of {name!r}")
        kept = torch.where(members[place] == 1, given, changed.to(given.dtype)).tolist()
        return [None if value is None else new for value, new in zip(column, kept, strict=True)]

    def _total(self, parts: Sequence[float | None]) -> float | None:
        terms = [weight * part for weight, part in zip(self.weights.values(), parts, strict=True) if part is not None]
        if not terms or (len(terms) < len(parts) and self.missing == "none"):
            return None
        return math.fsum(terms)
