"""``Pairs``: the best and the worst answer to each prompt, for losses that compare two."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses.preference.dpo import best_and_worst
from rlhfkit.modules.parts.advantages import with_advantages
from rlhfkit.modules.parts.rewards import MaskTruncated
from rlhfkit.parts import Part, Stage, overriding, part_name
from rlhfkit.validation import check_integer


class Pairs(Part):
    """Makes pairs of the samples with the largest and the smallest reward of each prompt; others are not learned from.

    The better answer of a pair has the advantage 1, the worse one -1. A prompt whose rewards are all equal, or of whose
    samples fewer than two could be scored, has no pair. A subclass overrides :meth:`compare` for other pairs.

    Args:
        truncated: Whether answers that the length limit cut off are compared.
        group_size: Samples that each prompt must have; ``None``: two or more.

    Raises:
        ValueError: If a part of the module changes rewards in a way that no comparison of two shows, or takes part in a
            policy loss, in whose place a loss of pairs is.
    """

    stage = Stage.SELECT
    reads = ("rewards", "group", "action_mask", "ref_logprobs")
    writes = ("advantages", "action_mask")

    def __init__(self, *, truncated: bool = True, group_size: int | None = None) -> None:
        check_integer("Pairs.group_size", group_size, minimum=2, optional=True)
        self.truncated, self.group_size = truncated, group_size

    def attach(self, module: Any) -> None:
        """Check its company."""
        super().attach(module)
        hooks = ("weigh", "old_logprobs")
        in_loss = [part_name(one) for one in module.parts if any(overriding([one], hook) for hook in hooks)]
        if in_loss:
            raise ValueError(
                f"{', '.join(in_loss)} takes part in a policy loss, and a loss of pairs has none: leave it out, or "
                "override loss()"
            )
        if self.truncated and any(isinstance(part, MaskTruncated) for part in module.parts):
            raise ValueError(
                "MaskTruncated would take one answer of a pair away: give Pairs(truncated=False), which compares no "
                "answer that was cut off"
            )
        shaping = [part_name(one) for one in module.parts if one.stage == Stage.SHAPE and "rewards" in one.writes]
        unused = [name for name in ("StopProperly", "MissingEndPenalty") if name in shaping and not self.truncated]
        if unused:
            raise ValueError(
                f"{', '.join(unused)} would have no effect beside Pairs(truncated=False), which compares no answer "
                "that was cut off: leave out the one or the other"
            )
        if "NormalizeRewards" in shaping:
            raise ValueError("NormalizeRewards changes no comparison of two rewards: leave it out")

    def compare(self, rows: Experience, rewards: Tensor) -> Tensor:
        """(B,) advantages of this rank's rows, NaN for those that are in no pair. A collective.

        ``rewards`` are (B,), NaN for samples that are not to be compared.
        """
        estimate = self.module.ranks.over_iteration
        found: Tensor = estimate(lambda all_, group, _: best_and_worst(all_, group), rows, rewards)
        return found.masked_fill(found == 0, torch.nan)

    def prepare(self, rows: Experience) -> Experience:
        """Add advantages, and mask what is in no pair."""
        rewards = rows.rewards if self.truncated else rows.rewards.masked_fill(rows.truncated, torch.nan)
        advantages = self.compare(rows, rewards)
        mask = rows.action_mask & ~advantages.isnan()[:, None]
        return dataclasses.replace(with_advantages(rows, advantages.nan_to_num()), action_mask=mask)

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if there are too few samples per prompt, or not as many as are compared."""
        exactly = self.group_size
        if group_size < 2 or (exactly is not None and group_size != exactly):
            raise ValueError(
                f"{type(self.module).__name__} compares the samples of a prompt, got group_size={group_size}: use "
                f"SamplingSpec(group_size={exactly or 2})" + ("" if exactly else " or more")
            )
