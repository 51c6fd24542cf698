"""Returns and advantages per token: GAE with a critic; returns, turns and the optimal token baseline without.

Rewards per token (B, T) come from :mod:`rlhfkit.losses.advantages.rewards`; outside the mask they are ignored. Tokens
of the environment (tool results, user turns) are no steps: every recursion skips them, as if the actions were adjacent.
OpenRLHF steps through them, with value 0 and discounting by their number.
"""

from typing import Protocol

import torch
from torch import Tensor

from rlhfkit.losses.advantages.group import as_advantages, by_group, precise
from rlhfkit.losses.advantages.rewards import token_rewards
from rlhfkit.losses.aggregation import check_same_shape, full_precision, select


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the actions of each sequence.

    ``δ_t = r_t + γ V_{t'} - V_t``, ``A_t = δ_t + γ λ A_{t'}``, ``R_t = A_t + V_t``, with ``t'`` the *next action* of
    the sequence, and ``V_{t'} = 0`` after the last one.

    Schulman et al. (2016, arXiv:1506.02438, equation 16). ``γ = 1`` in TRL, OpenRLHF and verl; ``λ`` is 0.95 in TRL and
    in the paper, 1 in OpenRLHF and verl, where returns do not depend on the values (VAPO: 1 for the critic,
    :func:`length_adaptive_lambda` for the policy, in two calls). Whiten with :func:`whiten` afterwards. Computed in
    ``log2(T)`` vectorised steps.

    Args:
        rewards: (B, T) per token.
        values: (B, T) the critic's before the iteration; ``values[:, t]`` is the state in which token t+1 is chosen.
        mask: (B, T), true where the policy chose the token. Masked entries may hold anything.
        gamma: ``γ`` in [0, 1].
        lam: ``λ`` in [0, 1], or (B,) one per sequence.
        last_values: (B,) value of the state after the last action of truncated answers; 0 when ``None``.

    Returns:
        Advantages and returns, (B, T) detached, in at least float32; 0 outside the mask.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(rewards=rewards, values=values, mask=mask)
    _check_unit("gamma", gamma)
    if isinstance(lam, Tensor):
        if lam.shape != rewards.shape[:1]:
            raise ValueError(f"lam must be a number or ({rewards.shape[0]},), got {tuple(lam.shape)}")
    else:
        _check_unit("lam", lam)
    order, chosen = actions_first(mask)
    reward = select(full_precision(rewards.detach()).gather(-1, order), chosen)
    value = select(full_precision(values.detach()).gather(-1, order), chosen)
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], -1)
    if last_values is not None:
        if last_values.shape != rewards.shape[:1]:
            raise ValueError(f"last_values must be ({rewards.shape[0]},), got {tuple(last_values.shape)}")
        final = chosen & ~torch.cat([chosen[:, 1:], torch.zeros_like(chosen[:, :1])], -1)
        following = torch.where(final, full_precision(last_values.detach()).unsqueeze(-1), following)
    delta = select(reward + gamma * following - value, chosen)
    if isinstance(lam, Tensor):
        decay = gamma * lam.detach().to(delta).unsqueeze(-1)
    else:
        decay = delta.new_full((1, 1), gamma * lam)
    advantages = _decayed_sum(delta, decay)
    return back_in_place(advantages, order, mask), back_in_place(advantages + value, order, mask)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float = 0.05) -> Tensor:
    """GAE's ``λ`` for sequences of very different length: the longer, the closer to 1.

    ``λ_i = 1 - 1 / (α l_i)``, at least 0, so that the sum of GAE's weights, ``1 / (1 - λ)``, is ``α l``.

    VAPO, Yue et al. (2025, arXiv:2504.05118).

    Args:
        lengths: (B,) actions of each sequence.
        alpha: ``α`` > 0; the paper's 0.05.

    Returns:
        (B,) in [0, 1), for the ``lam`` of :func:`gae`.

    Raises:
        ValueError: If ``alpha`` is not positive.
    """
    if not alpha > 0.0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    reach = alpha * full_precision(lengths)
    return (1.0 - 1.0 / reach.clamp(min=1.0)).clamp(min=0.0)


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Sum of the rewards from each token on, discounted per action.

    ``R_t = r_t + γ R_{t'}`` with ``t'`` the next action.

    Args:
        rewards: (B, T) per token.
        mask: (B, T), true where the policy chose the token. Masked entries may hold anything.
        gamma: ``γ`` in [0, 1].

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_same_shape(rewards=rewards, mask=mask)
    _check_unit("gamma", gamma)
    order, chosen = actions_first(mask)
    reward = select(full_precision(rewards.detach()).gather(-1, order), chosen)
    return back_in_place(_decayed_sum(reward, reward.new_full((1, 1), gamma)), order, mask)


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
        scale_std: Divide by the standard deviation; OpenRLHF's ``no_std_norm`` is false.
        eps: ``ε`` ≥ 0; TRL's 1e-4.

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


def _check_unit(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def actions_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Order that moves the selected tokens of each row to the front, and the mask in that order."""
    order = (~mask.bool()).to(torch.uint8).argsort(dim=-1, stable=True)
    return order, mask.bool().gather(-1, order)


def back_in_place(values: Tensor, order: Tensor, mask: Tensor) -> Tensor:
    return select(torch.zeros_like(values).scatter(-1, order, values), mask)


def _decayed_sum(values: Tensor, decay: Tensor) -> Tensor:
    """``S_t = x_t + c S_{t+1}``: each round adds what is 1, 2, 4, 8 … steps ahead."""
    steps, reach = values.shape[-1], 1
    while reach < steps:
        ahead = torch.cat([values[:, reach:], torch.zeros_like(values[:, :reach])], -1)
        values = values + decay * ahead
        decay = decay.square()
        reach *= 2
    return values
