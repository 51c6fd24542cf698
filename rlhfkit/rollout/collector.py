"""``collect_groups``: groups until an iteration is full: which are asked for, which are kept, which prompts come again.

One loop for every way of sampling. Without selection the prompts of the iteration are asked for and all their groups
taken. With dynamic sampling a group that is turned down is replaced by that of the next prompt. With oversampling more
groups are under way than are needed, the first to be complete are taken, and the prompts of the rest are put back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.protocols import Draws
from rlhfkit.rollout.streams import GroupStream


@dataclass(frozen=True)
class CollectedGroups:
    """What :func:`collect_groups` found."""

    groups: list[list[Sample]]
    """As many as were wanted: the accepted ones in the order of their prompts, then what they were filled up with."""
    accepted: int
    """Groups that were accepted; the rest of ``groups`` was not."""
    sampled: int
    """Groups that were sampled to their end and judged."""
    requeue: int
    """Prompts whose groups were begun and dropped."""
    reward: float
    """Mean reward of all groups that were sampled, the rejected ones included; NaN if none has one."""
    after: dict[str, Any]
    """Where the next iteration's draws begin."""


def collect_groups(
    wanted: int,
    draws: Draws,
    groups: GroupStream,
    *,
    keep: Callable[[Sequence[Sample]], bool] | None = None,
    most: int | None = None,
    spare: int = 0,
) -> CollectedGroups:
    """Sample until enough groups are accepted, or nothing is left that may be sampled.

    Without ``spare``, which groups are accepted does not depend on which are finished first: the prompts drawn are the
    shortest beginning of the sequence that has enough groups to keep. No accepted group is left over, ever: a group
    counts as accepted one by one, and when the last that is needed has come, everything else is put back.

    Args:
        wanted: Groups of the iteration.
        draws: Where its prompts come from.
        groups: What samples and scores them; closed at the end.
        keep: Whether a group is worth training on; ``None``: every group is.
        most: Prompts to sample at most; ``None``: all there are.
        spare: Groups under way beyond those that are still missing.

    Raises:
        ValueError: If there are fewer prompts than wanted groups.
        RuntimeError: If groups that were asked for never came.
    """
    drawn: list[Prompt] = []
    accepted: dict[int, list[Sample]] = {}
    rejected: dict[int, list[Sample]] = {}

    def draw(count: int) -> None:
        count = min(count, draws.left, (draws.left if most is None else most - len(drawn)))
        if count > 0:
            prompts = draws.take(count)
            drawn.extend(prompts)
            groups.submit(prompts)

    if draws.left < wanted:
        raise ValueError(f"an iteration of {wanted} groups needs as many different prompts, and there are {draws.left}")
    try:
        draw(wanted + spare)
        while len(accepted) < wanted:
            finished = groups.collect(wanted - len(accepted))
            if not finished:
                break
            for group in finished:
                good = keep is None or keep(group)
                (accepted if good else rejected)[group[0].prompt.index] = group
            draw(wanted + spare + len(rejected) - len(drawn))
    finally:
        groups.close()
    if len(accepted) + len(rejected) < min(wanted, len(drawn)):
        raise RuntimeError(
            f"{len(drawn)} groups were asked for, and the engine ended with {len(accepted) + len(rejected)} of them"
        )
    begun = [prompt for prompt in drawn if prompt.index not in accepted and prompt.index not in rejected]
    draws.requeue(begun)
    in_order = [prompt.index for prompt in drawn]
    kept = [accepted[index] for index in in_order if index in accepted]
    turned_down = [rejected[index] for index in in_order if index in rejected]
    draws.record([*kept, *turned_down])
    rewards = [s.reward for group in [*kept, *turned_down] for s in group if s.reward is not None]
    return CollectedGroups(
        groups=kept + turned_down[: wanted - len(kept)],
        accepted=len(kept),
        sampled=len(kept) + len(turned_down),
        requeue=len(begun),
        reward=sum(rewards) / len(rewards) if rewards else math.nan,
        after=draws.after,
    )
