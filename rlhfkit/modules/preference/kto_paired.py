"""``PairedKTOModule``: Kahneman–Tversky optimization on pairs (OpenRLHF's "vanilla" KTO)."""

from typing import Any

import torch

from rlhfkit.data.formats.preferences import PreferenceBatch
from rlhfkit.distributed import all_reduce
from rlhfkit.losses import GradientScope, LossOutput, gradient_scope, kto_kl_estimate, kto_kl_sums, kto_paired_loss
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.arguments import drop_hyperparameters, take_out
from rlhfkit.modules.preference.dpo import DPOModule
from rlhfkit.validation import check_number


class PairedKTOModule(DPOModule):
    """Kahneman–Tversky optimization on pairs of answers, whose two sides are each other's reference points.

    ``ℓ = λ_D (1 - σ(β(Δ_c - z_r))) + λ_U (1 - σ(β(z_c - Δ_r)))`` with ``z = max(0, mean Δ)`` of the other side, see
    :func:`~rlhfkit.losses.kto_paired_loss`. No mismatched answers are needed, so a step has one forward pass less than
    that of :class:`KTOModule`, which learns from pairs too: ``UnpairedPreferenceDataModule`` takes them apart.

    The means are over the pairs of a micro-batch on all ranks (OpenRLHF: on this rank). With
    ``accumulate_grad_batches`` above 1 the loss therefore depends on how a step is divided, unlike all other losses of
    pairs but ``aot``.

    Args:
        model: Folder or hub name of the policy.
        desirable_weight: λ_D, weight of the chosen answers.
        undesirable_weight: λ_U, weight of the rejected answers.
        **kwargs: ``beta`` (0.1), the reference and optimizer as in :class:`DPOModule`; its arguments of pair losses are
            refused.

    Raises:
        TypeError: If an argument of DPO's losses is given.
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, model: str, *, desirable_weight: float = 1.0, undesirable_weight: float = 1.0, **kwargs: Any
    ) -> None:
        refused = take_out(OF_DPO_LOSSES, kwargs, DPOModule)
        if refused:
            raise TypeError(f"PairedKTOModule has one loss, which does not take {', '.join(refused)}: leave it out")
        check_number("desirable_weight", desirable_weight, minimum=0)
        check_number("undesirable_weight", undesirable_weight, minimum=0)
        self.desirable_weight = desirable_weight  # before super(), which tries the loss
        self.undesirable_weight = undesirable_weight
        super().__init__(model, **kwargs)
        drop_hyperparameters(OF_DPO_LOSSES, self, DPOModule)

    def loss_gradient_scope(self, batch: PreferenceBatch) -> GradientScope | None:
        """The whole batch, and not even that: reference points are a sum over ranks, which is made once."""
        return None

    @gradient_scope("batch")
    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The loss of one micro-batch of B pairs, after :meth:`prepare`; override it for another objective."""
        logps = self.answer_logprobs(batch, out.logprobs)
        assert batch.ref_logprobs is not None
        sides = [
            (batch.chosen(logps), batch.chosen(batch.ref_logprobs)),
            (batch.rejected(logps), batch.rejected(batch.ref_logprobs)),
        ]
        sums = all_reduce(torch.stack([kto_kl_sums(*side, batch.pair_mask) for side in sides]))
        (chosen, ref_chosen), (rejected, ref_rejected) = sides
        return self._pair_loss(
            chosen=chosen,
            rejected=rejected,
            ref_chosen=ref_chosen,
            ref_rejected=ref_rejected,
            chosen_kl=kto_kl_estimate(sums[0]),
            rejected_kl=kto_kl_estimate(sums[1]),
            mask=batch.pair_mask,
            denominator=batch.pair_denominator,
        )

    def _pair_loss(self, **arguments: Any) -> LossOutput:
        for unused in ("chosen_lengths", "rejected_lengths", "mean_chosen_length", "weights"):
            arguments.pop(unused, None)
        result = kto_paired_loss(
            **arguments,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        counts = ("count/chosen", "count/rejected")  # sums, and metrics of pairs are averaged
        return LossOutput(result.loss, {name: value for name, value in result.metrics.items() if name not in counts})


OF_DPO_LOSSES = frozenset(
    {
        "loss_type",
        "label_smoothing",
        "divergence",
        "divergence_alpha",
        "discopop_temperature",
        "nll_coef",
        "use_weighting",
        "reference_free",
    }
)
"""Arguments of :class:`DPOModule` that belong to its losses."""
