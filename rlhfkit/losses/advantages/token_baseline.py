"""The optimal token baseline: a baseline for each position of an answer, from the other samples of the prompt."""

import torch
from torch import Tensor

from rlhfkit.losses.advantages.gae import actions_first, back_in_place
from rlhfkit.losses.advantages.group import by_group, precise
from rlhfkit.losses.aggregation import check_same_shape, full_precision, select


def optimal_token_advantages(rewards: Tensor, group: Tensor, mask: Tensor, logprobs: Tensor) -> Tensor:
    """Reward minus the baseline of least gradient variance of each position (optimal token baseline, OTB).

    ``A_it = r_i - Σ_j W_jt r_j / Σ_j W_jt`` over the samples j of the group that have a t-th action, with
    ``W_jt = Σ_{s ≤ t} w_js`` and ``w = (1 - π(y))²``. That is between the half and the whole of ``1 - 2 π(y) + Σ_v
    π(v)²``, the squared norm of the gradient of ``log π(y)`` with respect to the logits, and needs no forward pass.

    Li et al. ("The Optimal Token Baseline", PMLR 306, 2026); verl's ``optimal_token_baseline``. At positions that a
    single sample reaches the advantage is 0; verl's ``tir_optimal_token_baseline`` gives them a baseline of 0.
    :func:`opo_advantages` has one baseline an answer, with its length as weight.

    Args:
        rewards: (B,), NaN where missing. The whole batch: every row of a group must be in it.
        group: (B,) integer ids, equal for samples of one prompt.
        mask: (B, T), true where the policy chose the token. Masked entries may hold anything.
        logprobs: (B, T) under the policy that sampled; where NaN, ``π(y)`` counts as 0.

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask, for missing rewards, and for groups of equal ones.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(mask=mask, logprobs=logprobs)
    groups = by_group(rewards, group)
    order, chosen = actions_first(mask)
    learned = chosen & groups.present[:, None]
    chance = select(full_precision(logprobs.detach()), mask).nan_to_num(nan=-torch.inf).exp().gather(-1, order)
    weights = select(precise((1.0 - chance).square()), learned).cumsum(-1)
    weights = select(weights, learned)
    reward = groups.rewards[:, None]
    total = torch.zeros_like(weights).index_add(0, groups.slot, weights)
    weighted = torch.zeros_like(weights).index_add(0, groups.slot, weights * reward)
    baseline = (weighted / torch.where(total > 0, total, torch.ones_like(total)))[groups.slot]
    # Where no sample of the group has a gradient up to here, the weights say nothing and the mean of all counts.
    centred = torch.where(total[groups.slot] > 0, reward - baseline, groups.centred[:, None])
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    return back_in_place(select(centred, learned & groups.varied[:, None]).to(dtype), order, mask)
