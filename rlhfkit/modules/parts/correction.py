"""``Correction``: importance weights for what the policy that sampled differs from the one that is trained."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import CORRECTION_PRESETS, importance_weights, vespo_loss
from rlhfkit.losses.aggregation import select
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
        return "token" not in (self.arguments.get("level", "token"), self.arguments.get("reject_level"))

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
