"""PPO's clipped surrogate, and with other averages GRPO, DAPO, BNPO and Dr.GRPO."""

from rlhfkit.losses.policy.base import (
    PolicyTokens,
    RatioLevel,
    TokenLosses,
    check_clip,
    clip_metrics,
    clipped_surrogate,
    dual_clip_metrics,
    loss_of_tokens,
    preset_of,
)


@loss_of_tokens(aggregation="token-mean")
def ppo_loss(
    tokens: PolicyTokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
    ratio_level: RatioLevel = "token",
) -> TokenLosses:
    """Clipped surrogate of proximal policy optimisation (PPO).

    ``ρ_t = exp(clamp(log π(y_t) - log π_old(y_t), ±20))``,
    ``ℓ_t = -min(min(ρ_t, δ) A_t, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_t)``, where ``A_t < 0`` also ``ℓ_t ≤ -c A_t``; then
    ``w_t ℓ_t`` and :func:`aggregate`.

    Schulman et al. (2017, arXiv:1707.06347, equation 7). Two clip widths: DAPO (Yu et al., 2025, arXiv:2503.14476).
    Dual clip ``c``: Ye et al. (2019, arXiv:1912.09729, equation 5). ``δ``: INTELLECT-2 (2025, arXiv:2505.07291). With
    three policies see :func:`decoupled_ppo_loss`.

    Args:
        clip_low: ``ε_low`` in [0, 1]; 0.2 in all published variants.
        clip_high: ``ε_high`` ≥ 0; 0.2 in PPO, 0.28 in DAPO.
        dual_clip: ``c`` > 1, the largest ratio at a negative advantage; off by default as in OpenRLHF, 3 in verl.
        log_ratio_clamp: Limit of each token's log-ratio in nats, 20 as in OpenRLHF and verl; beyond it a token has
            no gradient. No limit when ``None``.
        delta: ``δ`` ≥ 1 + ``ε_high``, upper bound of the unclipped ratio; off by default, 4 in INTELLECT-2.
        aggregation: How the token losses become one number; ``token-mean`` as in OpenRLHF and verl.
        ratio_level: ``token``; ``sequence``: the geometric mean of the ratios of a sequence, as in
            :func:`gspo_loss`; ``sequence-sum``: their product, as in :func:`rloo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with metrics ``policy/clip_fraction`` (and ``_low``, ``_high``: tokens that lost their gradient at
        either bound), ``policy/approx_kl`` (k3 of old to new), ``policy/ppo_kl`` (k1, under verl's name),
        ``policy/ratio_mean``, ``policy/ratio_max``; with ``dual_clip`` also ``policy/dual_clip_fraction``, tokens of
        negative advantage whose ratio is above ``c`` (verl's ``pg_clipfrac_lower``).

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
    check_clip(clip_low, clip_high, dual_clip, delta)
    ratio = tokens.ratio_of(ratio_level)
    token_loss = clipped_surrogate(
        ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, delta=delta
    )
    return token_loss, clip_metrics(ratio, tokens, clip_low, clip_high) | dual_clip_metrics(ratio, tokens, dual_clip)


@preset_of(ppo_loss, fixed={"ratio_level": "token"}, aggregation="sequence-mean-token-mean")
def grpo_loss() -> None:
    """Group relative policy optimisation: :func:`ppo_loss` in which each sequence is a mean over its own tokens.

    The advantages come from :func:`group_advantages`. The KL penalty of the paper is a loss of its own,
    :func:`kl_loss` with the weight 0.04, added by :func:`sum_losses`.

    Shao et al. (2024, arXiv:2402.03300, equation 3).

    Args:
        advantages: (B,) from :func:`group_advantages`, (B, 1) or (B, T); detached here.
        aggregation: How the token losses become one number; ``sequence-mean-token-mean`` in the paper; the
            default of TRL and verl is ``token-mean``.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(grpo_loss, clip_high=0.28, aggregation="token-mean")
def dapo_loss() -> None:
    """DAPO: :func:`grpo_loss` with a wider upper clip and a mean over all tokens of the step.

    Yu et al. (2025, arXiv:2503.14476, equation 8). The other parts of DAPO are the overlong penalty
    (:class:`rlhfkit.rewards.LengthPenalty`), dynamic sampling (groups of equal rewards are rejected) and no KL penalty.

    Args:
        clip_low: ``ε_low``; the paper's 0.2.
        clip_high: ``ε_high``; the paper's 0.28, 0.2 in TRL.
        aggregation: How the token losses become one number; the paper's ``token-mean``.
        dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, denominator, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(dapo_loss, fixed={"denominator": None}, clip_high=0.2)
def bnpo_loss() -> None:
    """Batch-normalised token mean: :func:`grpo_loss` averaged over the tokens of this micro-batch alone.

    TRL's ``bnpo``, here for comparison: a token weighs more in a micro-batch with few tokens, unlike in
    :func:`dapo_loss` with a ``denominator``.

    Args:
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights, aggregation, max_length: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """


@preset_of(grpo_loss, aggregation="constant-length")
def dr_grpo_loss() -> None:
    """Dr.GRPO: :func:`grpo_loss` in which token losses are summed and divided by a constant length.

    Liu et al. (2025, arXiv:2503.20783, section 3.1), together with ``group_advantages(..., scale="none")``. The length
    of an answer then changes neither the sign nor the size of the gradients of its tokens.

    Args:
        aggregation: How the token losses become one number; the paper's ``constant-length``.
        denominator: Sequences of the whole optimizer step, divided by the number of micro-batches that are averaged; B
            when ``None``.
        max_length: Tokens; the generation limit, as in the paper and TRL. Required.
        clip_low, clip_high, dual_clip, log_ratio_clamp, delta: See :func:`ppo_loss`.
        logprobs, old_logprobs, advantages, mask, weights: See :mod:`rlhfkit.losses.policy`.

    Returns:
        The loss with the metrics of :func:`ppo_loss`.

    Raises:
        ValueError: If shapes do not fit, or an argument is unknown, out of range, missing or in conflict with another.
    """
