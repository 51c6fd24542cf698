"""Credit per turn: advantages that differ between the turns of an episode, and are equal within one.

For ``GRPOModule(advantages="turn_advantages")``, on samples whose rewards say when they were earned.
"""

from typing import Protocol

import torch
from torch import Tensor

from rlhfkit.losses.advantages.group import as_advantages, by_group
from rlhfkit.losses.advantages.rewards import token_rewards
from rlhfkit.losses.aggregation import select
from rlhfkit.losses.arguments import ADVANTAGE_ARGUMENTS, share_arguments


class RewardedTurns(Protocol):
    """What :func:`turn_advantages` reads of an iteration of B samples; :class:`~rlhfkit.data.Experience` has it."""

    rewards: Tensor
    """(B,), NaN where missing."""
    group: Tensor
    """(B,) integer ids, equal for samples of one prompt."""
    token_rewards: Tensor | None
    """(B, T), the part of ``rewards`` that each token earned; ``None``: the last action earned all."""

    @property
    def action_mask(self) -> Tensor:
        """(B, T), true where the policy chose the token."""
        ...


def turn_ends(mask: Tensor) -> Tensor:
    """(B, T) bool, true at the last token of each turn: of each run of tokens that the policy chose."""
    chosen = mask.bool()
    following = torch.nn.functional.pad(chosen[:, 1:], (0, 1))
    return chosen & ~following


@share_arguments(ADVANTAGE_ARGUMENTS)
def turn_advantages(
    experience: RewardedTurns, *, gamma: float = 1.0, scale_std: bool = True, eps: float = 1e-4
) -> Tensor:
    """Advantage of a token: the normalized rewards of its own turn and all later ones.

    ``A_{i,t} = Σ_{k ≥ turn(t)} γ^{k - turn(t)} (r_{i,k} - mean(R)) / (std(R) + ε)`` with ``R`` the rewards ``r_{i,k}``
    of all turns ``k`` of all samples ``i`` of a prompt, and ``std`` unbiased (n-1).

    Process supervision with GRPO, Shao et al. (DeepSeekMath, 2024, arXiv:2402.03300, section 4.1.3), whose steps are
    turns here; the GRPO of verl and TRL has outcome rewards only. A turn's reward is what was earned at its tokens and
    those of the environment after it; what ``rewards`` has beyond that belongs to the last turn. Where ``γ = 1`` and
    every turn of an episode but the last earns nothing, use GRPO's own: here longer episodes sum more of ``-mean(R)``.

    Args:
        experience: The iteration, of all ranks.
        gamma: ``γ`` in [0, 1], per turn; 1 in DeepSeekMath.

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask, for missing rewards, and in a group whose turns have
        all earned the same.

    Raises:
        ValueError: If ``gamma`` or ``eps`` is out of range.
    """
    if not 0.0 <= gamma <= 1.0 or not eps >= 0.0:
        raise ValueError(f"gamma must lie in [0, 1] and eps must be 0 or more, got {gamma} and {eps}")
    mask = experience.action_mask.bool()
    ends = turn_ends(mask)
    earned = token_rewards(experience.rewards, mask, earned=experience.token_rewards)
    number = (ends.long().cumsum(-1) - ends.long()).clamp(max=mask.shape[1] - 1)  # of a token's turn, from 0
    turns = earned.new_zeros(mask.shape).scatter_add(-1, number, select(earned, mask))
    count = ends.sum(-1, keepdim=True)
    exists = torch.arange(mask.shape[1], device=mask.device) < count
    scored = exists & ~experience.rewards.isnan()[:, None]
    values = turns.masked_fill(~scored, torch.nan)
    groups = by_group(values.flatten(), experience.group[:, None].expand(mask.shape).flatten())
    normalized = groups.centred / (groups.std + eps) if scale_std else groups.centred
    steps = select(as_advantages(normalized, groups.varied, values.flatten()).reshape(mask.shape), scored)
    later = torch.zeros_like(steps)
    total = steps.new_zeros(len(steps))
    for turn in range(int(count.max()) - 1, -1, -1):
        total = steps[:, turn] + gamma * total
        later[:, turn] = total
    return select(later.gather(-1, number), mask)
