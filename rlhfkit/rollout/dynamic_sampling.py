"""``DynamicSampling``: train only on groups whose rewards differ (DAPO, Yu et al., 2025)."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rlhfkit.data.types import Sample
from rlhfkit.validation import check_integer

Criterion = str | Callable[[Sample], float | None] | None
"""What has to differ in a group: a reward part by name, a function of a sample, or (``None``) the total reward."""


def has_signal(group: Sequence[Sample], by: Criterion = None) -> bool:
    """Whether the samples of a group that have a reward differ in ``by``; if not, every advantage is 0.

    Raises ValueError if no sample has a reward part named ``by``.
    """
    return len(set(compared_values(group, by))) > 1


def compared_values(group: Sequence[Sample], by: Criterion = None, *, owner: str = "DynamicSampling") -> list[float]:
    """What is compared of the samples of a group that have a reward; missing and NaN values are left out.

    Raises ValueError, about the argument ``by`` of ``owner``, if no sample has a reward part of that name.
    """
    scored = [sample for sample in group if sample.reward is not None]
    if isinstance(by, str):
        if scored and not any(by in sample.reward_parts for sample in scored):
            check_part(owner, by, {name for sample in scored for name in sample.reward_parts})
        values = [sample.reward_parts.get(by) for sample in scored]
    else:
        values = [sample.reward if by is None else by(sample) for sample in scored]
    return [value for value in values if value is not None and not math.isnan(value)]


def check_part(owner: str, name: str, parts: Collection[str]) -> None:
    """Raise ValueError, about the argument ``by`` of ``owner``, if no reward part has this name."""
    if name not in parts:
        raise ValueError(
            f"{owner}(by={name!r}): no reward part is called that; the parts are {', '.join(sorted(parts))}"
        )


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Sample further prompts until enough groups have different rewards.

    DAPO, Yu et al. (2025, arXiv:2503.14476, section 3.2). Each rejected group is replaced by that of the next prompt,
    so prompts are used in order, each once.

    If the reward has parts, name the one to compare; DAPO and verl compare accuracy. With a length penalty, for
    example, the totals of a group differ even if all its answers are correct.

    Example::

        RolloutCallback(reward=math_match, dynamic_sampling=DynamicSampling())
        RolloutCallback(
            reward=WeightedSum(math_match=math_match, length=(overlong, 0.5)),
            dynamic_sampling=DynamicSampling(by="math_match"),
        )
    """

    by: Criterion = None
    """What has to differ within a group: a reward part by name (``model``: the score of the module's ``reward_model``),
    or a function of a sample; ``None``: the total reward, before the module's penalties."""
    keep: Callable[[Sequence[Sample]], bool] | None = None
    """A rule of your own in place of ``by``: whether to train on a group, given its samples."""
    max_rounds: int = 10
    """Sample at most this many times the prompts of an iteration (verl's ``max_num_gen_batches``). If groups are still
    missing, rejected ones fill the iteration, with a warning; their advantages are 0."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_integer("max_rounds", self.max_rounds, minimum=1)
        if self.by is not None and self.keep is not None:
            raise ValueError("DynamicSampling takes by=... or a rule of your own (keep=...), not both")

    def accepts(self, group: Sequence[Sample]) -> bool:
        """Whether to train on a group of scored samples; raises ValueError if ``by`` names no reward part."""
        return has_signal(group, self.by) if self.keep is None else self.keep(group)

    def check_parts(self, parts: Collection[str]) -> None:
        """Raise ValueError if ``by`` is not among the names of the reward parts."""
        if isinstance(self.by, str) and self.keep is None:
            check_part("DynamicSampling", self.by, parts)
