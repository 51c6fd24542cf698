"""``DynamicSampling``: only groups whose rewards say something fill an iteration (DAPO, Yu et al., 2025)."""

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

    DAPO, Yu et al. (2025, arXiv:2503.14476, section 3.2). Each group that is turned down is replaced by that of the
    next prompt, so that no accepted group is ever left over and the prompts are used in their order, each once.

    Example::

        RolloutCallback(reward=math_match, dynamic_sampling=DynamicSampling())
    """

    keep: Callable[[Sequence[Sample]], bool] = has_signal
    """Whether a group is worth training on: any function of its samples."""
    max_rounds: int = 10
    """Sample at most that many times the prompts of an iteration (verl's ``max_num_gen_batches``). What is missing then
    is filled with groups that were turned down, with a warning; they do no harm, as their advantages are 0."""

    def __post_init__(self) -> None:
        """Check the limit."""
        if self.max_rounds < 1:
            raise ValueError(f"DynamicSampling(max_rounds=...) must be at least 1, got {self.max_rounds}")
