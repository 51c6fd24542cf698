"""Importance sampling between the trainer's policy and the engine's that sampled.

Engine and trainer give different log-probs for the same weights (kernels, precision), and asynchronous engines have
older weights. :func:`importance_weights` covers TIS, IcePop, MIS and others by the *level* of the ratio and the *mode*
of its bounds, for the ``weights`` of any policy loss; :func:`mismatch_metrics` says whether they are needed.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import check_same_shape, full_precision, masked_mean, masked_sum, select
from rlhfkit.losses.metrics import max_metric, mean_metric, min_metric, sums_metric
from rlhfkit.losses.policy.base import per_token

CorrectionLevel = Literal["token", "sequence", "geometric"]
"""Level of the ratio: of a token, of a sequence (the product), or the geometric mean over a sequence."""
CorrectionMode = Literal["truncate", "mask", "clip", "none"]
"""Treatment of a ratio outside the bounds, see :func:`importance_weights`."""
RejectionLevel = Literal["token", "sequence-mean", "sequence-sum", "sequence-max"]
"""Level at which :func:`rejection_mask` compares a divergence with its bounds."""

CORRECTION_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "tis": {"level": "token", "mode": "truncate", "high": 2.0},
        "icepop": {"level": "token", "mode": "mask", "low": 0.5, "high": 5.0},
        "mis": {"level": "sequence", "mode": "mask", "high": 3.0},
        "seq-tis": {"level": "sequence", "mode": "truncate", "high": 2.0},
        "geo-mask": {"level": "geometric", "mode": "mask", "low": 0.99, "high": 1.01},
        "seq-mask-tis": {"level": "token", "mode": "none", "reject": ("geometric", 0.5, 5.0)},
    }
)
"""Published corrections as arguments of :func:`importance_weights`: ``importance_weights(a, b, m, **PRESETS["tis"])``.

=================  =================================================================================================
``tis``            truncated importance sampling, Yao et al. (2025), cap 2 as there and in verl; OpenRLHF's ``tis`` is
                   ``level="token", mode="clip", low=0.5, high=5``
``icepop``         Ling team (2025, arXiv:2510.18855), bounds 0.5 and 5
``mis``            masked importance sampling of whole sequences, Liu et al. (2025); cap 3, TRL's default
``seq-tis``        truncated, of whole sequences, as verl
``geo-mask``       sequences whose mean log-ratio is beyond 1 %, as in Molt; 0.1 % in verl
``seq-mask-tis``   OpenRLHF's: token weights *without* a bound for sequences whose geometric mean lies in [0.5, 5]
=================  =================================================================================================
"""


class CorrectionOutput(NamedTuple):
    """The result of :func:`importance_weights`.

    Attributes:
        weights: (B, T) detached, for the ``weights`` of a policy loss; 0 where rejected, 1 outside the mask.
        keep: (B, T) bool, true where the token was not rejected.
        metrics: Detached scalars.
    """

    weights: Tensor
    keep: Tensor
    metrics: Mapping[str, Tensor]


def importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: CorrectionLevel = "token",
    mode: CorrectionMode = "truncate",
    low: float | None = None,
    high: float | None = 2.0,
    reject: tuple[CorrectionLevel, float | None, float | None] | None = None,
    log_ratio_clamp: float = 20.0,
    normalize: bool = False,
) -> CorrectionOutput:
    """Bounded importance weights from the policy that sampled to the trainer's.

    ``r_t = exp(log π_old(y_t) - log μ(y_t))``; by level ``w_t = r_t``, ``Π_t r_t`` or ``(Π_t r_t)^(1/n)``; by mode
    ``truncate``: ``min(w, high)``, ``clip``: ``clip(w, low, high)``, ``mask``: ``w`` where ``low ≤ w ≤ high``, else 0,
    or ``none``: ``w``; and 0 where ``reject`` has another level, at which the ratio lies outside its bounds; with
    ``normalize`` then ``w_t / mean(w)``.

    Published combinations are in :data:`CORRECTION_PRESETS`. The default is truncated importance sampling (Yao et al.,
    "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025) with verl's cap. ``sequence`` is the
    product, as in TRL.

    Args:
        logprobs: (B, T) the trainer's log-probs before the iteration (``old_logprobs``); detached here.
        rollout_logprobs: (B, T) the engine's, at the same temperature and before truncation (top-p and the like). Where
            NaN (not given), the ratio is 1 and the token enters no metric.
        mask: (B, T), true where a token counts. Masked entries may hold anything.
        level: ``token``, ``sequence`` or ``geometric``.
        mode: ``truncate``, ``clip``, ``mask`` or ``none``.
        low: Lower bound of the ratio ≥ 0; none when ``None``.
        high: Upper bound of the ratio; none when ``None``.
        reject: Level, lower and upper bound of a second test, such as ``("geometric", 0.5, 5.0)``, of which one bound
            may be ``None``; no such test when ``None``.
        log_ratio_clamp: Limit in nats of the log-ratio at every level.
        normalize: Divide the weights by their mean over the tokens of this call (self-normalised importance sampling,
            verl's ``rollout_is_batch_normalize``), so that a mismatch does not change the size of the update. The
            result then depends on how a step is split into micro-batches.

    Returns:
        Weights, the mask of what was kept, and metrics under verl's names: ``rollout_corr/is_mean``, ``is_max``,
        ``is_min``, ``is_std`` of the weights before masking (bounded by ``log_ratio_clamp`` alone),
        ``rollout_corr/eff_sample_size`` of the weights returned (``(Σw)² / (n Σw²)``, in [0, 1]; alarming below 0.3),
        ``rollout_corr/is_bounded_fraction`` (ratios outside the bounds) and ``rollout_corr/masked_fraction`` (weights
        set to 0), shares of tokens.

    Raises:
        ValueError: If shapes differ, a name is unknown, or bounds are missing, crossed or without meaning.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    _check_bounds(level, mode, low, high, log_ratio_clamp)
    if reject is not None:
        _check_bounds(reject[0], "mask", *reject[1:], log_ratio_clamp, name="reject")
    mask = mask.bool()
    log_ratio, known = _log_ratio(logprobs, rollout_logprobs, mask)
    ratio = _ratio_at(level, log_ratio, known, log_ratio_clamp)
    outside = _outside(ratio, None if mode == "truncate" else low, high) & mask
    weights = ratio if mode in ("mask", "none") else ratio.clamp(low if mode == "clip" else None, high)
    rejected = outside if mode == "mask" else torch.zeros_like(mask)
    if reject is not None:
        tested = _ratio_at(reject[0], log_ratio, known, log_ratio_clamp)
        rejected = rejected | (_outside(tested, *reject[1:]) & mask)
    weights = select(select(weights, mask, fill=1.0), ~rejected)
    if normalize:
        mean = masked_mean(weights, mask)
        weights = torch.where(mask & (mean > 0.0), weights / mean.clamp(min=torch.finfo(weights.dtype).tiny), weights)
    count = known.sum()
    squares = masked_sum(weights.square(), known)
    metrics = {
        "rollout_corr/is_mean": mean_metric(ratio, known),
        # Sums about 1, where ratios lie: a variance from sums of squares cancels digits.
        "rollout_corr/is_std": sums_metric(
            _deviation, count, masked_sum(ratio - 1.0, known), masked_sum((ratio - 1.0).square(), known)
        ),
        "rollout_corr/is_max": max_metric(ratio, known),
        "rollout_corr/is_min": min_metric(ratio, known),
        "rollout_corr/eff_sample_size": sums_metric(_effective_fraction, count, masked_sum(weights, known), squares),
        "rollout_corr/is_bounded_fraction": mean_metric(outside.float(), mask),
        "rollout_corr/masked_fraction": mean_metric(rejected.float(), mask),
    }
    return CorrectionOutput(weights, ~rejected, metrics)


def rejection_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: RejectionLevel,
    divergence: Literal["k1", "k2", "k3"] = "k3",
    low: float | None = None,
    high: float,
) -> Tensor:
    """Tokens or whole sequences at which the two policies agree well enough to be trained on.

    With ``x_t = log π_old(y_t) - log μ(y_t)``, the divergence ``d_t`` is ``x`` (k1, whose bounds are those of the ratio
    ``e^x``), ``x²/2`` (k2) or ``e^x - 1 - x`` (k3); kept where its value, its mean, sum or maximum over the sequence is
    within bounds.

    verl's rollout rejection sampling (``token_k1``, ``seq_mean_k3`` …), except that verl's bounds of k1 are those of
    engine over trainer: ``rollout_rs_threshold="0.8_1.5"`` is ``low=1/1.5, high=1/0.8`` here. Sequence maxima: trust
    region masking (Li et al., 2025, arXiv:2512.23075).

    Args:
        logprobs: (B, T) the trainer's; detached here.
        rollout_logprobs: (B, T) the engine's; NaN where it gave none, such a token passes.
        mask: (B, T), true where a token counts.
        level: ``token``, ``sequence-mean``, ``sequence-sum`` or ``sequence-max``.
        divergence: ``k1``, ``k2`` or ``k3``.
        low: Only for ``k1``: lower bound of the ratio, ``1 / high`` when ``None``.
        high: Upper bound: of the ratio for ``k1``, of the divergence in nats for ``k2`` and ``k3``.

    Returns:
        (B, T) bool; true outside the mask.

    Raises:
        ValueError: If shapes differ, a name is unknown or bounds are crossed or without effect.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    if level not in get_args(RejectionLevel):
        raise ValueError(f"level must be one of {', '.join(get_args(RejectionLevel))}, got {level!r}")
    if divergence not in ("k1", "k2", "k3"):
        raise ValueError(f"divergence must be one of k1, k2, k3, got {divergence!r}")
    if divergence != "k1" and low is not None:
        raise ValueError(f"low belongs to divergence 'k1', got low={low} with {divergence!r}")
    if not high > 0.0 or (low is not None and not 0.0 < low <= high):
        raise ValueError(f"need 0 < low <= high, got low={low} and high={high}")
    mask = mask.bool()
    log_ratio, known = _log_ratio(logprobs, rollout_logprobs, mask)
    if divergence == "k1":
        value, floor, ceiling = log_ratio, math.log(1.0 / high if low is None else low), math.log(high)
    elif divergence == "k2":
        value, floor, ceiling = log_ratio.square() / 2, -math.inf, high
    else:
        value, floor, ceiling = torch.expm1(log_ratio.clamp(max=80.0)) - log_ratio, -math.inf, high
    if level == "sequence-mean":
        value = masked_mean(value, known, -1).unsqueeze(-1)
    elif level == "sequence-sum":
        value = masked_sum(value, known, -1).unsqueeze(-1)
    elif level == "sequence-max":
        # Of k1 the largest excursion in both directions has to pass.
        value = value.abs().amax(-1, keepdim=True) if divergence == "k1" else value.amax(-1, keepdim=True)
    inside = (value >= floor) & (value <= ceiling)
    return (inside | ~mask).expand_as(mask)


def off_policy_sequence_mask(
    advantages: Tensor, logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Sequences to train on: all except those with a negative advantage from which the policy has drifted away.

    ``A_i ≥ 0 or mean_t (log μ(y_t) - log π(y_t)) ≤ threshold``

    DeepSeek-V3.2 (2025, arXiv:2512.02556); TRL's ``off_policy_mask_threshold``, slime's OPSM. As the ``mask`` of a loss
    the result shrinks the local token count; as ``weights`` (``.float()``) it leaves all counts unchanged, as in TRL.

    Args:
        advantages: (B,), (B, 1) or (B, T).
        logprobs: (B, T) under the policy; detached here.
        rollout_logprobs: (B, T) under the policy that sampled.
        mask: (B, T), true where a token counts. Masked entries may hold anything.
        threshold: Nats per token; no default, it is tuned.

    Returns:
        (B, T) bool, constant along a sequence where advantages are. True outside the mask too.

    Raises:
        ValueError: If shapes do not fit.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    drift = full_precision(rollout_logprobs.detach()) - full_precision(logprobs.detach())
    near = masked_mean(drift, mask, -1).unsqueeze(-1) <= threshold
    return near | ~(select(per_token(advantages.detach(), logprobs, "advantages"), mask) < 0.0)


def mismatch_metrics(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Metrics of the mismatch between trainer and engine on sampled tokens, under verl's names.

    Args:
        logprobs: (B, T) the trainer's; detached here.
        rollout_logprobs: (B, T) the engine's; NaN entries are ignored.
        mask: (B, T), true where a token counts.

    Returns:
        ``rollout_corr/kl`` (k1 of engine to trainer, nats per token), ``k3_kl``; ``training_ppl`` and ``rollout_ppl``
        (mean over sequences of ``exp(-mean_t log p)``), their logs ``training_log_ppl`` and ``rollout_log_ppl``,
        ``log_ppl_diff`` (trainer minus engine), ``log_ppl_abs_diff``, ``log_ppl_diff_max``, ``log_ppl_diff_min``,
        ``ppl_ratio``; ``chi2_token`` and ``chi2_seq`` (``E[r²] - 1``, which grows with the variance of the weights);
        ``logprob_abs_diff_mean`` and ``logprob_abs_diff_max``.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    log_ratio, known = _log_ratio(logprobs, rollout_logprobs, mask.bool())
    trainer = -masked_mean(full_precision(logprobs.detach()), known, -1)
    engine = -masked_mean(full_precision(rollout_logprobs.detach()), known, -1)
    rows = known.any(-1)
    difference = trainer - engine
    product = masked_sum(log_ratio, known, -1).clamp(-20.0, 20.0)
    clamped = log_ratio.clamp(-20.0, 20.0)
    metrics = {
        "kl": mean_metric(-log_ratio, known),
        "k3_kl": mean_metric(torch.expm1(clamped) - clamped, known),
        "training_ppl": mean_metric(trainer.clamp(max=80.0).exp(), rows),
        "training_log_ppl": mean_metric(trainer, rows),
        "rollout_ppl": mean_metric(engine.clamp(max=80.0).exp(), rows),
        "rollout_log_ppl": mean_metric(engine, rows),
        "log_ppl_diff": mean_metric(difference, rows),
        "log_ppl_abs_diff": mean_metric(difference.abs(), rows),
        "log_ppl_diff_max": max_metric(difference, rows),
        "log_ppl_diff_min": min_metric(difference, rows),
        "ppl_ratio": mean_metric(difference.clamp(-20.0, 20.0).exp(), rows),
        "chi2_token": mean_metric(torch.expm1(2.0 * clamped), known),
        "chi2_seq": mean_metric(torch.expm1(2.0 * product), rows),
        "logprob_abs_diff_mean": mean_metric(log_ratio.abs(), known),
        "logprob_abs_diff_max": max_metric(log_ratio.abs(), known),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) log-ratio, 0 where unknown, and the mask of where it is known."""
    known = mask & ~rollout_logprobs.isnan()
    return select(full_precision(logprobs.detach()) - full_precision(rollout_logprobs.detach()), known), known


def _deviation(state: Tensor) -> Tensor:
    """Standard deviation from the count, the sum and the sum of squares."""
    count, total, squares = state
    count = count.clamp(min=1)
    variance: Tensor = squares / count - (total / count).square()
    return variance.clamp(min=0).sqrt()


def _effective_fraction(state: Tensor) -> Tensor:
    """``(Σw)² / (n Σw²)`` from n, Σw and Σw²."""
    count, total, squares = state
    fraction: Tensor = total.square() / (count * squares).clamp(min=torch.finfo(squares.dtype).tiny)
    return fraction


def _ratio_at(level: CorrectionLevel, log_ratio: Tensor, known: Tensor, limit: float) -> Tensor:
    if level != "token":
        reduce = masked_sum if level == "sequence" else masked_mean
        log_ratio = reduce(log_ratio, known, -1).unsqueeze(-1).expand_as(log_ratio)
    return log_ratio.clamp(-limit, limit).exp()


def _outside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside = outside | (ratio < low)
    return outside if high is None else outside | (ratio > high)


def _check_bounds(
    level: CorrectionLevel,
    mode: CorrectionMode,
    low: float | None,
    high: float | None,
    log_ratio_clamp: float,
    *,
    name: str = "",
) -> None:
    if level not in get_args(CorrectionLevel):
        which = f"the level of {name}" if name else "level"
        raise ValueError(f"{which} must be one of {', '.join(get_args(CorrectionLevel))}, got {level!r}")
    if mode not in get_args(CorrectionMode):
        raise ValueError(f"mode must be one of {', '.join(get_args(CorrectionMode))}, got {mode!r}")
    if mode == "truncate" and (low is not None or high is None):
        raise ValueError(f"mode 'truncate' needs high and no low (that is mode 'clip'), got low={low}, high={high}")
    if mode in ("clip", "mask") and low is None and high is None:
        raise ValueError(f"{name or f'mode {mode!r}'} needs low, high or both")
    if not ((low is None or low >= 0.0) and (high is None or high > (low or 0.0))):
        raise ValueError(f"bounds of the ratio need 0 <= low < high, got low={low} and high={high}")
    if not log_ratio_clamp > 0.0:
        raise ValueError(f"log_ratio_clamp must be positive, got {log_ratio_clamp}")
