"""``DynamicSampling``: train only on groups whose rewards differ (DAPO, Yu et al., 2025)."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart, Rollouts
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, Source
from rlhfkit.data.types import Sample
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.validation import check_integer, resolve_function

log = logging.getLogger(__name__)

Criterion = str | Callable[[Sample], float | None] | None
"""What has to differ in a group: a reward part by name, a function of a sample, or (``None``) the total reward."""


def criterion(by: Criterion) -> Criterion:
    """What is compared, with a dotted name turned into the function that it names."""
    return resolve_function(by, "by") if isinstance(by, str) and "." in by else by


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


class DynamicSampling(RolloutPart):
    """Sample further prompts until enough groups have different rewards.

    DAPO, Yu et al. (2025, arXiv:2503.14476, section 3.2). Each rejected group is replaced by that of the next prompt,
    so prompts are used in order, each once.

    If the reward has parts, name the one to compare; DAPO and verl compare accuracy. With a length penalty, for
    example, the totals of a group differ even if all its answers are correct.

    Example::

        RolloutCallback(math_match, parts=[DynamicSampling()])
        RolloutCallback(
            WeightedSum(math_match=math_match, length=(overlong, 0.5)),
            parts=[DynamicSampling(by="math_match")],
        )

    Args:
        by: What has to differ within a group: a reward part by name (``model``: the score of the module's
            ``reward_model``), or a function of a sample or its dotted name; ``None``: the total reward, before the
            module's penalties.
        keep: A rule of your own in place of ``by``: whether to train on a group, given its samples; a function or its
            dotted name.
        max_rounds: Sample at most this many times the prompts of an iteration (verl's ``max_num_gen_batches``). If
            groups are still missing, rejected ones fill the iteration, with a warning; their advantages are 0.

    Raises:
        ValueError: If ``max_rounds`` is below 1, or both rules are given.
    """

    def __init__(
        self,
        *,
        by: Criterion = None,
        keep: Callable[[Sequence[Sample]], bool] | str | None = None,
        max_rounds: int = 10,
    ) -> None:
        check_integer("max_rounds", max_rounds, minimum=1)
        if by is not None and keep is not None:
            raise ValueError("DynamicSampling takes by=... or a rule of your own (keep=...), not both")
        self.by = criterion(by)
        self.keep = None if keep is None else resolve_function(keep, "keep")
        self.max_rounds = max_rounds

    def accepts(self, group: Sequence[Sample]) -> bool:
        """Whether to train on a group of scored samples; raises ValueError if ``by`` names no reward part."""
        return has_signal(group, self.by) if self.keep is None else self.keep(group)

    def attach(self, rollouts: Rollouts) -> None:
        super().attach(rollouts)
        rollouts.collector.keep, rollouts.collector.max_rounds = self.accepts, self.max_rounds

    def check(self, trainer: L.Trainer) -> None:
        """Raise ValueError if groups are compared by a reward part that there is not."""
        parts = self.rollouts.collector.reward_parts()
        if parts is not None and isinstance(self.by, str):
            check_part("DynamicSampling", self.by, parts)

    def wrap(self, source: Source) -> Source:
        self._source = source
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        collected = self._source.collect(ask)
        if collected.accepted < ask.wanted and ask.trainer.global_rank == 0:
            log.warning(
                "iteration %d: DynamicSampling accepted only %d of the %d groups that are needed, of %d that were "
                "sampled; the rest is filled with rejected groups",
                *(ask.iteration, collected.accepted, ask.wanted, collected.sampled),
            )
        return collected

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        collected = shared.collected
        return {
            "rollout/accepted_fraction": collected.accepted / max(collected.sampled, 1),
            "rollout/reward_before_selection": collected.reward,
        }
