"""``DPOModule``: direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290) and its variants."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from rlhfkit.data.formats import PreferenceBatch
from rlhfkit.losses import LossOutput, dpo_loss, length_desensitized_logprobs, wpo_weights
from rlhfkit.losses.preference.dpo import SORTS_THE_BATCH, Divergence, PairLoss, refuse_list
from rlhfkit.models import LoRA, ModelLoading, PolicyOutput, policy_output
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.preference.base import PreferenceModule, reference_of, reference_part
from rlhfkit.parts import GivenPart, plain_value
from rlhfkit.validation import GivenFunction, check_number, function_name, function_or_name

GivenLosses = str | Mapping[str, Any] | PairLoss | Mapping[PairLoss, float] | Mapping[str | PairLoss, float]
"""The losses of :func:`~rlhfkit.losses.dpo_loss`, or a function as :data:`~rlhfkit.validation.GivenFunction`."""
_HOME = "rlhfkit.losses.preference.dpo"


class DPOModule(PreferenceModule):
    """Direct preference optimization: learning from preference pairs, regularized towards a reference model.

    The reference is the initial policy: a frozen copy (the default), the policy with its adapters switched off (with
    ``lora``), or log-probs that are computed once before training, see
    :class:`~rlhfkit.modules.parts.answer_reference.PrecomputedReference`. :class:`PreferenceModule` describes the
    metrics. Override :meth:`loss` for another objective, or pass a function of
    :class:`~rlhfkit.losses.PreferencePairs` as ``loss_type``::

        DPOModule("Qwen/Qwen3-0.6B", loss_type={"sigmoid": 1.0, "sft": 0.2}, precompute_ref_log_probs=True)

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default).
        beta: β, strength of the regularization towards the reference; 0.1 as in the paper, TRL and OpenRLHF.
        loss_type: A name from :data:`~rlhfkit.losses.preference.dpo.PAIR_LOSSES`, a function or its dotted name, or a
            mapping of those to weights (TRL's ``loss_weights``). ``aot`` and ``aot_unpaired`` sort the pairs of a
            micro-batch and so depend on its size. :class:`~rlhfkit.losses.preference.dpo.DiscoPOP` is such a function,
            with an argument: in YAML ``{class_path: ..., init_args: {temperature: 0.1}}``.
        label_smoothing: ε in [0, 0.5), the probability that a label is wrong.
        divergence: Divergence of f-DPO (TRL's ``f_divergence_type``): a name from
            :data:`~rlhfkit.losses.preference.dpo.DIVERGENCES`, or a function of ``log π(y|x) - log π_ref(y|x)``,
            such as :class:`~rlhfkit.losses.preference.dpo.AlphaDivergence`.
        nll_coef: Weight of the negative log-likelihood per token of each chosen answer (iterative RPO; OpenRLHF's
            ``nll_loss_coef``).
        ld_alpha: Weight, in [0, 1], of an answer's tokens beyond the length of the shorter answer (LD-DPO, Liu et al.,
            2024, arXiv:2409.06411); ``None``: 1.
        use_weighting: Weight pairs by the policy's probability of writing them (WPO, Zhou et al., 2024,
            arXiv:2406.11827). Costs a second forward pass without gradient.
        reference_free: Use no reference; its log-probs are taken as 0.
        ref_model: Folder or hub name of the reference; ``None``: ``model``.
        precompute_ref_log_probs: Compute the reference's log-probs once, before training; no reference model is kept.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

    Raises:
        ValueError: If an argument is out of range, or two of them contradict each other.
    """

    beta: float
    reference_free: bool

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        beta: float = 0.1,
        loss_type: GivenLosses = "sigmoid",
        label_smoothing: float = 0.0,
        divergence: Divergence | GivenFunction = "reverse_kl",
        nll_coef: float = 0.0,
        ld_alpha: float | None = None,
        use_weighting: bool = False,
        reference_free: bool = False,
        ref_model: str | None = None,
        precompute_ref_log_probs: bool = False,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        if reference_free and (precompute_ref_log_probs or ref_model is not None):
            raise ValueError("reference_free uses no reference: leave ref_model and precompute_ref_log_probs out")
        self.own_parts = [] if reference_free else [reference_part(ref_model, precompute=precompute_ref_log_probs)]
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        check_number("beta", beta, above=0)
        check_number("label_smoothing", label_smoothing, minimum=0, below=0.5)
        check_number("nll_coef", nll_coef, minimum=0)
        check_number("ld_alpha", ld_alpha, minimum=0, maximum=1, optional=True)
        losses = imported_losses(loss_type)
        self.keep_plain(loss_type=named_losses(losses), divergence=plain_value(divergence, "divergence"))
        self.ref_model_name = ref_model
        self.precompute_ref_log_probs = precompute_ref_log_probs
        self.ld_alpha = ld_alpha
        self.use_weighting = use_weighting
        self._sorts = bool(SORTS_THE_BATCH.intersection(losses))
        reference, weights = None if reference_free else torch.zeros(1), torch.ones(1) if use_weighting else None
        self.learn_by(
            dpo_loss,
            {"ref_chosen": reference, "ref_rejected": reference, "weights": weights},
            beta=beta,
            loss_type=losses,
            label_smoothing=label_smoothing,
            divergence=imported_divergence(divergence),
            nll_coef=nll_coef,
            reference_free=reference_free,
        )

    # ------------------------------------------------------------------ the reference

    @property
    def measure(self) -> tuple[Any, ...]:
        """What :meth:`answer_logprobs` depends on beside its class, by which computed log-probs are found again."""
        return (self.ld_alpha,)

    def prepare(self, batch: PreferenceBatch) -> PreferenceBatch:
        """Add the reference's log-probs unless the data has them; RuntimeError if they should be precomputed."""
        reference = reference_of(self)
        return batch if reference is None else dataclasses.replace(batch, ref_logprobs=reference.logprobs(batch))

    # ------------------------------------------------------------------ one micro-batch

    def answer_logprobs(self, batch: PreferenceBatch, logprobs: Tensor) -> Tensor:
        """(2B,) log-probs of the answers from those of their tokens, (2B, T-1).

        Tokens beyond the shorter answer's length have the weight ``ld_alpha``.
        """
        alpha = self.ld_alpha
        if alpha is None:
            return super().answer_logprobs(batch, logprobs)
        lengths = batch.loss_mask.sum(-1)
        shared = torch.minimum(batch.chosen(lengths), batch.rejected(lengths)).repeat_interleave(2)
        return length_desensitized_logprobs(logprobs, batch.loss_mask, shared, alpha=alpha)

    @torch.no_grad()
    def sharpened_logprobs(self, batch: PreferenceBatch) -> Tensor:
        """(2B, T-1) log-probs of the tokens at temperature 1/2."""
        return policy_output(self.policy, batch, batch.loss_mask, temperature=0.5).logprobs

    def pair_weights(self, batch: PreferenceBatch, out: PolicyOutput) -> Tensor:
        """(B,) weights of WPO: the policy's probability per token of writing both answers.

        ``log Σ_v p_v²`` over the vocabulary is ``2 log p_t - log p'_t`` for any token t, with p' at temperature 1/2.
        """
        logprobs = out.logprobs.detach()
        weights = wpo_weights(logprobs, batch.loss_mask, 2 * logprobs - self.sharpened_logprobs(batch))
        return batch.chosen(weights) * batch.rejected(weights)

    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The loss of one micro-batch of B pairs, after :meth:`prepare`; override it for another objective."""
        arguments = self.pair_arguments(batch, out)
        if batch.ref_logprobs is not None and not self.reference_free:
            arguments["ref_chosen"] = batch.chosen(batch.ref_logprobs)
            arguments["ref_rejected"] = batch.rejected(batch.ref_logprobs)
        if self.use_weighting:
            arguments["weights"] = self.pair_weights(batch, out)
        if not self._sorts:
            return self._pair_loss(**arguments)
        arguments.pop("mask")  # these losses sort the batch: either all of its pairs count, or it trains nothing
        result = self._pair_loss(**arguments)
        return LossOutput(result.loss * batch.pair_mask.any(), result.metrics)

    def predict_step(self, batch: PreferenceBatch, batch_idx: int) -> dict[str, Tensor]:
        """Log-probs of both answers of each pair and their implicit rewards ``β (log π - log π_ref)``, (B,) each."""
        with torch.no_grad():
            batch = self.prepare(batch)
            logps = self.answer_logprobs(batch, self.policy_output(batch).logprobs)
            reference = torch.zeros_like(logps) if batch.ref_logprobs is None else batch.ref_logprobs
            rewards = self.beta * (logps - reference)
        named = {"logps": logps, "rewards": rewards}
        return {
            f"{name}/{side}": part(values).cpu()
            for name, values in named.items()
            for side, part in (("chosen", batch.chosen), ("rejected", batch.rejected))
        }


def imported_losses(loss_type: GivenLosses) -> dict[Any, float]:
    """Losses of pairs and their weights; those of dotted names are imported, rlhfkit's own stay names.

    Raises:
        TypeError: If several are given without weights.
        ValueError: If a weight is no number, or a name cannot be imported.
    """
    refuse_list(loss_type)
    if not isinstance(loss_type, Mapping) or "class_path" in loss_type:
        return {function_or_name(cast(GivenFunction, loss_type), "loss_type", home=_HOME): 1.0}
    for name, weight in loss_type.items():
        check_number(f"the weight of loss_type {name!r}", weight)
    return {
        function_or_name(cast(GivenFunction, name), "loss_type", home=_HOME): float(weight)
        for name, weight in loss_type.items()
    }


def imported_divergence(divergence: GivenFunction) -> Any:
    """A divergence, imported as :func:`imported_losses` does."""
    return function_or_name(divergence, "divergence", home=_HOME)


def named_losses(losses: Mapping[Any, float]) -> dict[str, Any]:
    """The same in plain values, for checkpoints; of several, those with arguments of their own cannot be made again."""
    only, *_ = [plain_value(one, "loss_type") for one in losses]
    if isinstance(only, dict) and [*losses.values()] == [1.0]:
        return only
    return {one if isinstance(one, str) else function_name(one): weight for one, weight in losses.items()}
