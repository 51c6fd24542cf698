"""Objectives of a policy that is compared with another sampler while it learns: XPO's bonus, and Nash-MD's gradient."""

from typing import Literal, get_args

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import LossOutput, aggregate, check_same_shape, full_precision, masked_mean, select

PreferenceLink = Literal["win-rate", "bradley-terry"]
"""How two rewards become the probability that the first answer is preferred, see :func:`preference_advantages`."""


def exploration_loss(
    logprobs: Tensor,
    *,
    alpha: float = 1e-5,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """XPO's term of optimism, which is added to a loss of pairs: the reference's own answers become less likely.

    ``L = α Σ_i m_i log π(ỹ_i|x_i) / D`` with ``ỹ ~ π_ref``.

    Exploratory Preference Optimization, Xie et al. (2024, arXiv:2405.21046, algorithm 1); added to :func:`dpo_loss` of
    the pairs of an answer of the policy and one of the reference. The paper's sum is over all iterations so far, that
    of TRL and here over the pairs of the step.

    Args:
        logprobs: (B,) summed log-probs of the reference's answers under the policy.
        alpha: α ≥ 0; 1e-5 as in TRL.
        mask: (B,) answers that count, all when ``None``; the others may hold anything.
        denominator: Pairs of the whole optimizer step, divided by the number of micro-batches that are averaged. The
            answers of this call when ``None``.

    Returns:
        The loss with the metric ``exploration/logps``, the mean of ``logprobs``.

    Raises:
        ValueError: If shapes differ or ``alpha`` is negative.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    if not alpha >= 0.0:
        raise ValueError(f"alpha must not be negative, got {alpha}")
    keep = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    logps = select(full_precision(logprobs), keep)
    metrics = {"exploration/logps": masked_mean(logps.detach(), keep)}
    return LossOutput(aggregate(alpha * logps, keep, denominator=denominator), metrics)


def nash_md_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    *,
    beta: float = 0.1,
    mask: Tensor | None = None,
    denominator: Tensor | float | None = None,
) -> LossOutput:
    """Nash-MD: a policy gradient on the probability of being preferred to a mixture of policy and reference.

    ``L = -Σ_i m_i log π(y_i|x_i) sg(A_i - β log(π(y_i|x_i) / π_ref(y_i|x_i))) / D`` with ``A = P(y ≻ y'|x) - 1/2``.

    Nash Learning from Human Feedback, Munos et al. (2023, arXiv:2312.00886, section 7), whose τ is our β. The log-ratio
    is that of the whole answer, as in the paper. (TRL weights each token's log-prob with the log-ratio of that token
    alone, which leaves out what a token does to the divergence of later ones.)

    Args:
        logprobs: (B,) summed log-probs of the policy's answers under the policy.
        ref_logprobs: (B,) the same under the reference model; detached here.
        advantages: (B,) ``A`` of :func:`preference_advantages`; detached here.
        beta: β ≥ 0, strength of the tie to the reference; 0.1 as in TRL.
        mask: (B,) answers that count, all when ``None``; the others may hold anything.
        denominator: Answers of the whole optimizer step, divided by the number of micro-batches that are averaged. The
            answers of this call when ``None``.

    Returns:
        The loss with the metrics ``nash/preference`` (the mean of ``P``), ``nash/log_ratio`` (nats per answer) and
        ``nash/logps``.

    Raises:
        ValueError: If shapes differ or ``beta`` is negative.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs, advantages=advantages, mask=mask)
    if not beta >= 0.0:
        raise ValueError(f"beta must not be negative, got {beta}")
    keep = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    logps = select(full_precision(logprobs), keep)
    log_ratio = logps.detach() - select(full_precision(ref_logprobs.detach()), keep)
    better = select(full_precision(advantages.detach()), keep)
    losses = -logps * (better - beta * log_ratio)
    metrics = {
        "nash/preference": masked_mean(better + 0.5, keep),
        "nash/log_ratio": masked_mean(log_ratio, keep),
        "nash/logps": masked_mean(logps.detach(), keep),
    }
    return LossOutput(aggregate(losses, keep, denominator=denominator), metrics)


def preference_advantages(
    rewards: Tensor, group: Tensor, by_policy: Tensor, *, link: PreferenceLink = "win-rate"
) -> Tensor:
    """How much likelier than not an answer of the policy is preferred to those of another sampler.

    ``A_i = mean_j P(i ≻ j) - 1/2`` over the other sampler's answers j to the same prompt. ``win-rate``:
    ``P = (1 + r_i - r_j) / 2``, which for the two win rates of a pair is the judgement itself; ``bradley-terry``:
    ``P = σ(r_i - r_j)``.

    Munos et al. (2023, arXiv:2312.00886, section 7); with a reward model in place of a preference model TRL's Nash-MD
    takes the second.

    Args:
        rewards: (N,), NaN where missing.
        group: (N,) integers, equal for the samples of one prompt.
        by_policy: (N,) bool, true for the policy's samples.
        link: How rewards are compared; for ``win-rate`` they are in [0, 1].

    Returns:
        (N,) of the dtype of ``rewards``; NaN for the other sampler's answers, and where nothing could be compared.

    Raises:
        ValueError: If the shapes differ, ``link`` is unknown, or a reward cannot be a win rate.
    """
    check_same_shape(rewards=rewards, group=group, by_policy=by_policy)
    if link not in get_args(PreferenceLink):
        raise ValueError(f"link must be one of {', '.join(get_args(PreferenceLink))}, got {link!r}")
    known, ours = ~rewards.isnan(), by_policy.bool()
    if link == "win-rate" and bool(((rewards < 0) | (rewards > 1)).any()):
        raise ValueError(
            f"win rates are in [0, 1], and a reward is {float(rewards[(rewards < 0) | (rewards > 1)][0]):g}: compare "
            "rewards of any size with 'bradley-terry'"
        )
    difference = rewards[:, None] - rewards
    preferred = (1 + difference) / 2 if link == "win-rate" else difference.sigmoid()
    compared = (group[:, None] == group) & (ours & known)[:, None] & (~ours & known)
    sums, counts = torch.where(compared, preferred, 0.0).sum(-1), compared.sum(-1)
    return torch.where(counts > 0, sums / counts.clamp(min=1) - 0.5, torch.nan)
