"""Policy losses whose ratio is taken token by token: PPO, GRPO and what differs from them by a line.

All policy losses, here and in the files beside this one, are called in one way, and any of them is the ``policy_loss``
of a module::

    loss(logprobs, old_logprobs, advantages, mask, *, weights, aggregation, denominator, max_length, ...)

and take ``rollout_logprobs`` (the engine's) or ``ref_logprobs`` (the reference's) as keywords where they need them.
Log-probs are on the next-token axis (``logprobs[:, t]`` belongs to token t+1), shapes (B, T) for B sequences and T
tokens, in any floating dtype; masked entries may hold anything. ``denominator`` makes the gradient of an optimizer step
independent of how it is split over micro-batches and ranks, see :func:`rlhfkit.losses.aggregate`.
"""

from torch import Tensor

from rlhfkit.losses.aggregation import Aggregation, LossOutput
from rlhfkit.losses.policy.base import (
    RatioLevel,
    check_clip,
    clip_metrics,
    clipped_surrogate,
    policy_loss_output,
    policy_tokens,
)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_clamp: float | None = 20.0,
    delta: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token-mean",
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
    ratio_level: RatioLevel = "token",
) -> LossOutput:
    """Clipped surrogate of proximal policy optimisation.

    ``ρ_t = exp(clamp(log π(y_t) - log π_old(y_t), ±20))``,
    ``ℓ_t = -min(min(ρ_t, δ) A_t, clip(ρ_t, 1 - ε_low, 1 + ε_high) A_t)``, where ``A_t < 0`` also ``ℓ_t ≤ -c A_t``; then
    ``w_t ℓ_t`` and :func:`aggregate`.

    Schulman et al. (2017, arXiv:1707.06347, equation 7). Two clip widths: DAPO (Yu et al., 2025, arXiv:2503.14476).
    Dual clip ``c``: Ye et al. (2019, arXiv:1912.09729, equation 5). Upper bound ``δ`` of the unclipped ratio:
    INTELLECT-2 (2025, arXiv:2505.07291). With three policies see :func:`decoupled_ppo_loss`.

    Args:
        logprobs: (B, T) log-probs of the sampled tokens under the policy, with gradient.
        old_logprobs: (B, T) under the policy before this iteration (``logprobs.detach()`` in its first update).
        advantages: (B, T), or (B, 1) or (B,) when all tokens of a sequence share one.
        mask: (B, T), true where the policy chose the token and it is trained on.
        clip_low: ``ε_low`` in [0, 1]; 0.2 everywhere.
        clip_high: ``ε_high`` ≥ 0; 0.2 in PPO, 0.28 in DAPO.
        dual_clip: ``c`` > 1, the largest ratio at a negative advantage; off by default as in OpenRLHF, 3 in verl.
        log_ratio_clamp: Limit of the log-ratio in nats (OpenRLHF's and verl's 20); ``None`` for none.
        delta: ``δ`` ≥ 1 + ``ε_high``; off by default, 4 in INTELLECT-2.
        weights: (B, T), (B, 1) or (B,) factors of the clipped loss, e.g. importance correction; detached here.
        aggregation: How tokens become one number; ``token-mean`` as OpenRLHF and verl.
        denominator: Tokens (sequences for the other aggregations) of the whole optimizer step over the number of
            micro-batches averaged; the local count when ``None``.
        max_length: Tokens; only for ``aggregation="constant-length"``.
        ratio_level: Whose ratio is clipped: ``token``; ``sequence`` is :func:`gspo_loss`, ``sequence-sum``
            :func:`rloo_loss`.

    Returns:
        The loss with metrics ``policy/clip_fraction`` (and ``_low``, ``_high``: tokens that lost their gradient at
        either side), ``policy/approx_kl`` (k3 of old to new), ``policy/ppo_kl`` (k1, under verl's name),
        ``policy/ratio_mean``, ``policy/ratio_max``.

    Raises:
        ValueError: If shapes do not fit or a knob is unknown or out of range.
    """
    check_clip(clip_low, clip_high, dual_clip, delta)
    tokens = policy_tokens(logprobs, old_logprobs, advantages, mask, log_ratio_clamp=log_ratio_clamp)
    ratio = tokens.ratio_of(ratio_level)
    token_loss = clipped_surrogate(
        ratio, tokens.advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, delta=delta
    )
    return policy_loss_output(
        token_loss,
        tokens,
        weights=weights,
        aggregation=aggregation,
        denominator=denominator,
        max_length=max_length,
        metrics=clip_metrics(ratio, tokens, clip_low, clip_high),
    )
