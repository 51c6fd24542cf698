"""How the policy that sampled differs from the trained one: ``Correction`` weights it, ``EngineMismatch`` logs it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import CORRECTION_PRESETS, importance_weights, masked_sum, max_metric, vespo_loss
from rlhfkit.losses.aggregation import select
from rlhfkit.losses.metrics import sums_metric
from rlhfkit.models import PolicyOutput
from rlhfkit.parts import Part, overriding


class Correction(Part):
    """Weights tokens or answers by how likely the trainer's policy is to have sampled them.

    For engines with other kernels or fewer bits, stale and replayed samples, see
    :func:`~rlhfkit.losses.importance_weights`. Without one there is no correction, but ``"tis"`` if the engine is
    quantized or samples are replayed, unless there is :class:`NoCorrection`. Not for policy losses that are given the
    engine's log-probs (``decoupled_ppo_loss``, ``dppo_loss``), which account for them. Example::

        GRPOModule("Qwen/Qwen3-0.6B", parts=[Correction("tis")])

    Args:
        kind: A name of :data:`~rlhfkit.losses.CORRECTION_PRESETS` (``"tis"``, ``"icepop"``, ``"mis"``, ...), or
            arguments of :func:`~rlhfkit.losses.importance_weights`.

    Raises:
        ValueError: If there is no such correction, or the module's policy loss cannot take it.
    """

    reads = ("rollout_logprobs",)

    def __init__(self, kind: str | Mapping[str, Any] = "tis") -> None:
        if isinstance(kind, str) and kind not in CORRECTION_PRESETS:
            raise ValueError(f"correction must be one of {', '.join(CORRECTION_PRESETS)}, got {kind!r}")
        self.kind = kind
        self.arguments: Mapping[str, Any] = CORRECTION_PRESETS[kind] if isinstance(kind, str) else kind
        """Arguments of :func:`~rlhfkit.losses.importance_weights`."""
        probe = torch.zeros(1, 1)
        try:
            importance_weights(probe, probe, probe == 0, **self.arguments)
        except TypeError as error:
            raise ValueError(f"correction has arguments of importance_weights: {error}") from error

    def attach(self, module: Any) -> None:
        """Check that the policy loss takes weights, and does not correct by itself."""
        super().attach(module)
        loss = module.policy_loss
        if loss.takes("rollout_logprobs"):
            raise ValueError(
                f"{loss.name} is given the engine's log-probs and accounts for them itself, so that a Correction would "
                "count them twice: leave it out, or take another policy_loss"
            )
        others = [part for part in module.parts if part is not self and overriding([part], "weigh")]
        if self.weighs_sequences and others and loss.function is vespo_loss:
            raise ValueError(
                "vespo_loss multiplies the weights of a sequence's tokens, and beside other weights of tokens a "
                "correction of sequences has the same weight at each of them: use a correction of tokens "
                "(Correction('tis'))"
            )

    @property
    def weighs_sequences(self) -> bool:
        """Whether all tokens of a sequence have the same weight."""
        return "token" not in (self.arguments.get("level", "token"), *(self.arguments.get("reject") or ())[:1])

    def weigh(self, batch: Experience, out: PolicyOutput, old: Tensor) -> tuple[Tensor, Mapping[str, Any]]:
        """Importance weights of tokens (B, T-1), or of sequences (B, 1), and their metrics."""
        mask = batch.action_mask
        weights, _, metrics = importance_weights(old, batch.rollout_logprobs, mask, **self.arguments)
        if self.weighs_sequences:
            # (B, 1), not repeated on every token: VESPO takes the product over a sequence.
            weights = select(weights, mask, fill=-torch.inf).amax(-1, keepdim=True)
            weights = select(weights, mask.any(-1, keepdim=True), fill=1.0)
        return weights, metrics


class NoCorrection(Part):
    """Learns from samples of a quantized engine without the :class:`Correction` that is made for them otherwise."""


class EngineMismatch(Part):
    """Logs how far the log-probs of engine and trainer are apart, for the same tokens and policy.

    The metrics have verl's names, as those of :func:`~rlhfkit.losses.mismatch_metrics`, and are NaN if the engine knows
    no log-probs (see ``RolloutEngine.configure_logprobs``). Replayed samples, which are of other policies on purpose,
    are left out. Modules that learn from their own samples make one.
    """

    @torch.no_grad()
    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> dict[str, Tensor]:
        """Compare the trainer's log-probs before the iteration with the engine's."""
        known = batch.action_mask & ~batch.rollout_logprobs.isnan()
        if batch.replayed is not None:
            known = known & ~batch.replayed[:, None]
        log_ratio = select(old.float() - batch.rollout_logprobs.float(), known)
        difference, count, clamped = log_ratio.abs(), known.sum(), log_ratio.clamp(-20.0, 20.0)
        weights, k3 = clamped.exp(), torch.expm1(clamped) - clamped
        weight_sums = masked_sum(weights, known), masked_sum(weights.square(), known)
        return {
            "rollout_corr/logprob_abs_diff_mean": sums_metric(_mean, difference.sum(), count),
            "rollout_corr/logprob_abs_diff_max": max_metric(difference, known, empty=math.nan),
            "rollout_corr/k3_kl": sums_metric(_mean, masked_sum(k3, known), count),
            "rollout_corr/untruncated_eff_sample_size": sums_metric(_effective_fraction, *weight_sums, count),
        }


def _mean(state: Tensor) -> Tensor:
    return state[0] / state[1]


def _effective_fraction(state: Tensor) -> Tensor:
    """``(Σw)² / (n Σw²)`` from Σw, Σw² and n."""
    return state[0].square() / (state[1] * state[2])
