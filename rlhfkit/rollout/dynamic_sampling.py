"""``DynamicSampling``: only groups whose rewards say something fill an iteration (DAPO, Yu et al., 2025)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhfkit.data.experience import Sample


def has_signal(group: Sequence[Sample]) -> bool:
    """Whether the rewards of a group differ: else every advantage is 0 and nothing is learned.

    Args:
        group: The samples of one prompt; those without a reward do not count.
    """
    return len({sample.reward for sample in group if sample.reward is not None}) > 1


@dataclass(frozen=True, kw_only=True)
class DynamicSampling:
    """Sample further prompts until enough groups are worth training on.

    DAPO, Yu et al. (2025, arXiv:2503.14476, section 3.2). Each round draws exactly as many prompts as groups are still
    missing, so that no accepted group is ever left over and the prompts are used in their order, each once.

    Example::

        RolloutCallback(reward=math_match, dynamic_sampling=DynamicSampling())
    """

    keep: Callable[[Sequence[Sample]], bool] = has_signal
    """Whether a group is worth training on: any function of its samples."""
    max_rounds: int = 10
    """Rounds of sampling per iteration at most (verl's ``max_num_gen_batches``). What is missing then is filled with
    groups that were turned down, with a warning; they do no harm, as their advantages are 0."""

    def __post_init__(self) -> None:
        """Check the limit."""
        if self.max_rounds < 1:
            raise ValueError(f"DynamicSampling(max_rounds=...) must be at least 1, got {self.max_rounds}")

    def fill(
        self,
        wanted: int,
        available: int,
        sample: Callable[[int, int], list[list[Sample]]],
    ) -> "FilledIteration":
        """Sample until enough groups are accepted, or the limit is reached.

        Args:
            wanted: Groups of the iteration.
            available: Different prompts that there are at most.
            sample: Called with how many prompts to skip and how many to take; gives their groups in order.
        """
        accepted: list[list[Sample]] = []
        rejected: list[list[Sample]] = []
        used, rounds = 0, 0
        while len(accepted) < wanted and rounds < self.max_rounds and used < available:
            count = min(wanted - len(accepted), available - used)
            for group in sample(used, count):
                (accepted if self.keep(group) else rejected).append(group)
            used, rounds = used + count, rounds + 1
        filling = rejected[: wanted - len(accepted)]
        return FilledIteration(accepted + filling, used, len(accepted), rounds, accepted + rejected)


@dataclass(frozen=True)
class FilledIteration:
    """What :meth:`DynamicSampling.fill` found."""

    groups: list[list[Sample]]
    """As many as were wanted."""
    used: int
    """Prompts that were sampled."""
    accepted: int
    """Groups that were accepted; the rest of ``groups`` was not."""
    rounds: int
    """Times that the engine was asked."""
    everything: list[list[Sample]]
    """All groups that were sampled."""

    def metrics(self) -> dict[str, float]:
        """Share of the sampled groups that were accepted, rounds, and the mean reward of all of them."""
        rewards = [sample.reward for group in self.everything for sample in group if sample.reward is not None]
        return {
            "rollout/accepted_fraction": self.accepted / max(self.used, 1),
            "rollout/rounds": float(self.rounds),
            "rollout/reward_before_selection": sum(rewards) / len(rewards) if rewards else math.nan,
        }
