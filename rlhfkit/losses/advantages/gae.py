"""Returns and advantages per token, from per-token rewards: GAE with a critic, REINFORCE++ without.

Rewards per token (B, T) come from :mod:`rlhfkit.losses.advantages.rewards`; outside the mask they are ignored. Tokens
of the environment (tool results, user turns) are no steps: every recursion skips them, as if the actions were adjacent.
OpenRLHF steps through them, with value 0 and discounting by their number.
"""

import torch
from torch import Tensor

from rlhfkit.losses.advantages.group import group_advantages
from rlhfkit.losses.advantages.rewards import token_rewards
from rlhfkit.losses.aggregation import check_same_shape, full_precision, select, whiten
from rlhfkit.losses.arguments import ADVANTAGE_ARGUMENTS, share_arguments


@share_arguments(ADVANTAGE_ARGUMENTS)
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
        lam: ``λ`` in [0, 1], or (B,) one per sequence.
        last_values: (B,) value of the state after the last action of truncated answers; 0 when ``None``.

    Returns:
        Advantages and returns, (B, T) detached, in at least float32; 0 outside the mask.
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


@share_arguments(ADVANTAGE_ARGUMENTS)
def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Sum of the rewards from each token on, discounted per action.

    ``R_t = r_t + γ R_{t'}`` with ``t'`` the next action.

    Args:
        rewards: (B, T) per token.

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask.
    """
    check_same_shape(rewards=rewards, mask=mask)
    _check_unit("gamma", gamma)
    order, chosen = actions_first(mask)
    reward = select(full_precision(rewards.detach()).gather(-1, order), chosen)
    return back_in_place(_decayed_sum(reward, reward.new_full((1, 1), gamma)), order, mask)


@share_arguments(ADVANTAGE_ARGUMENTS)
def reinforce_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    gamma: float = 1.0,
    scale_std: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """REINFORCE++: returns of each token, whitened over all tokens of the batch.

    ``A_t = (R_t - mean(R)) / std(R)`` with :func:`discounted_returns` and :func:`whiten`.

    Hu et al. (2025, arXiv:2501.03262), where the KL penalty is part of the rewards (:func:`token_rewards`).

    Args:
        rewards: (B, T) per token.
        moments: (3,) sum over ranks of ``masked_moments(discounted_returns(...), mask)``; this batch's when ``None``.

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask.
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return whiten(returns, mask, scale_std=scale_std, moments=moments)


@share_arguments(ADVANTAGE_ARGUMENTS)
def reinforce_baseline_advantages(
    rewards: Tensor,
    group: Tensor,
    mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    scale_std: bool = True,
    moments: Tensor | None = None,
) -> Tensor:
    """REINFORCE++-baseline: the group's mean as baseline, the batch's deviation as scale.

    ``r'_i = r_i - mean(r_group)``, then :func:`reinforce_advantages` of ``r'_i`` on the last action and
    ``-β kl_t`` on each.

    Hu et al. (2025, arXiv:2501.03262), as OpenRLHF's ``reinforce_baseline``.

    Args:
        rewards: (B,), NaN where missing: such a row has reward 0 after the baseline.
        moments: (3,) sum over ranks of the moments of the returns; of this batch when ``None``.

    Returns:
        (B, T) detached, in at least float32; 0 outside the mask.
    """
    centred = group_advantages(rewards, group, scale="none")
    per_token = token_rewards(centred, mask, kl=kl, kl_coef=kl_coef)
    return reinforce_advantages(per_token, mask, scale_std=scale_std, moments=moments)


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
