"""``KTOModule``: Kahneman–Tversky optimisation (Ethayarajh et al., 2024, arXiv:2402.01306)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from rlhfkit.data.collate import TokenBatch
from rlhfkit.data.preferences import PreferenceExample
from rlhfkit.data.unpaired import ReferencedBatch, UnpairedBatch, UnpairedExamples
from rlhfkit.losses import LossOutput, kto_kl_estimate, kto_kl_sums, kto_loss, sequence_logprobs
from rlhfkit.losses.kto import KTOLossType
from rlhfkit.models import has_adapter, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.functions import function_name
from rlhfkit.modules.reference import ReferenceModule
from rlhfkit.modules.reference_cache import cached_reference, compute_reference, model_fingerprint

ADVISED_RATIO = (1.0, 1.5)
"""Between which the paper puts ``λ_D n_D / (λ_U n_U)``, see :func:`~rlhfkit.losses.kto_loss`."""


class KTOModule(ReferenceModule):
    """A policy that learns from single answers, each labelled desirable or not.

    The reference point, an estimate of ``KL(π ‖ π_ref)``, is exact over the optimizer step: its first micro-batch
    brings the mismatched pairs of all of them, they go through the policy once without gradient, and their sum is taken
    over all ranks before the first loss. So neither it nor the gradient depends on micro-batches, ranks, padding or
    packing.

    Override :meth:`loss` for another objective on the same log-probs.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default; the paper advises 5e-6 for full and more for adapter training).
        beta: β of the loss; 0.1 as in the paper and TRL.
        desirable_weight: λ_D, weight of the desirable answers. Unbalanced data is warned of, with a value that fits.
        undesirable_weight: λ_U.
        loss_type: ``kto``, or ``apo_zero_unpaired`` (D'Oosterlinck et al., 2024, arXiv:2408.06266), which needs no
            reference point and so no mismatched pairs.
        precompute_ref_log_probs: Compute what the reference says about all data once before training, prompts shared
            by an answer and its mismatched one, and keep it on disk; no reference is held then. A step costs the
            gradient pass and one pass without gradient for the reference point.
        ref_cache: Folder for that; ``None``: ``reference_logprobs`` in the Trainer's ``default_root_dir``.
        **kwargs: See :class:`ReferenceModule` (a reference of another name, one that moves) and :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range.
    """

    kl: Tensor
    """() float32, reference point of the optimizer step that is running."""

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        loss_type: KTOLossType = "kto",
        precompute_ref_log_probs: bool = False,
        ref_cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, lr=lr, **kwargs)
        # A buffer, so that a checkpoint inside an accumulation window has it.
        self.register_buffer("kl", torch.zeros(()))
        self._validation_kl = torch.zeros(())
        self._sums = torch.zeros(6)
        # One tiny evaluation shows every bad knob of the loss here, not an hour into the run.
        self._kto_loss(torch.zeros(1), torch.zeros(1), torch.ones(1).bool(), self.kl)

    def build_policy(self) -> nn.Module:
        """Load the policy without dropout: its log-probs are compared with the reference's."""
        policy = super().build_policy()
        disable_dropout(policy)
        return policy

    # ------------------------------------------------------------------ the reference

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model has to be at hand during training."""
        return not self.hparams["precompute_ref_log_probs"]

    @contextmanager
    def _reference_for_once(self) -> Iterator[nn.Module]:
        if self.hparams["ref_model"] is None and has_adapter(self.policy):
            with self.reference_model() as reference:
                yield reference
        else:
            yield self.build_reference().to(self.device)

    def _precompute(self, loaders: Any) -> None:
        """Give the answers behind these loaders their reference log-probs."""
        if not self.hparams["precompute_ref_log_probs"]:
            return
        folder = Path(self.hparams["ref_cache"] or Path(self.trainer.default_root_dir) / "reference_logprobs")
        for examples in _unpaired_examples(loaders):
            if examples.ref_logprobs is None:
                pairs = _WithMismatched(examples)
                compute = partial(self._computed, pairs)
                examples.ref_logprobs = cached_reference(pairs, self._cache_key, folder, self.trainer, compute)

    def _cache_key(self) -> Iterator[Any]:
        yield model_fingerprint(self.hparams["ref_model"] or self.hparams["model"])
        yield str(self.trainer.precision), function_name(type(self).answer_logprobs)

    def _computed(self, pairs: "_WithMismatched") -> Tensor:
        with self._reference_for_once() as model:
            return compute_reference(
                pairs, model, self.answer_logprobs, self.trainer, max_tokens=self.hparams["max_tokens_per_forward"]
            )

    # ------------------------------------------------------------------ forward

    def answer_logprobs(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """Log-prob of each completion.

        Args:
            model: The policy or the reference.
            batch: B sequences.

        Returns:
            (B,) sums over the completion's tokens.
        """
        return sequence_logprobs(policy_output(model, batch, batch.loss_mask).logprobs, batch.loss_mask)

    @torch.no_grad()
    def reference_logprobs(self, batch: ReferencedBatch) -> Tensor:
        """Log-prob of each completion under the reference model, unless it came with the data.

        Args:
            batch: B sequences.

        Returns:
            (B,).

        Raises:
            RuntimeError: If it was to be computed before training and the batch does not have it.
        """
        if batch.ref_logprobs is not None:
            return batch.ref_logprobs
        if self.hparams["precompute_ref_log_probs"]:
            raise RuntimeError(
                "precompute_ref_log_probs found no UnpairedExamples behind this batch's loader: use "
                "UnpairedPreferenceDataModule, or an UnpairedLoader"
            )
        with self.reference_model() as reference:
            return self.answer_logprobs(reference, batch)

    @torch.no_grad()
    def kl_estimate(self, mismatched: Sequence[ReferencedBatch]) -> Tensor:
        """Reference point of the loss, over all ranks. A collective.

        Args:
            mismatched: This rank's mismatched pairs of an optimizer step.

        Returns:
            Scalar, nats per sequence, 0 or more.

        Raises:
            ValueError: If there are none.
        """
        if not mismatched:
            raise ValueError(
                "the batch that starts an optimizer step has no mismatched pairs: KTO needs data with at least two "
                "different prompts from UnpairedPreferenceDataModule; loss_type='apo_zero_unpaired' does without"
            )
        sums = torch.zeros(2, device=self.device)
        for batch in mismatched:
            counted = batch.loss_mask.any(-1)
            policy = self.answer_logprobs(self.policy, batch)
            sums += kto_kl_sums(policy, self.reference_logprobs(batch), counted)
        return kto_kl_estimate(self._summed(sums))

    def _summed(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.trainer.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def loss(self, batch: UnpairedBatch, logprobs: Tensor, ref_logprobs: Tensor, kl: Tensor) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B labelled answers.
            logprobs: (B,) under the policy.
            ref_logprobs: (B,) under the reference model.
            kl: Scalar, the reference point of the step; without meaning for ``apo_zero_unpaired``.
        """
        mask, denominator = batch.loss_mask.any(-1), batch.sequence_denominator
        return self._kto_loss(logprobs, ref_logprobs, batch.desirable, kl, mask=mask, denominator=denominator)

    def _kto_loss(
        self, logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, kl: Tensor, **arguments: Any
    ) -> LossOutput:
        return kto_loss(
            logprobs,
            ref_logprobs,
            desirable,
            kl if self._has_reference_point else None,
            beta=self.hparams["beta"],
            desirable_weight=self.hparams["desirable_weight"],
            undesirable_weight=self.hparams["undesirable_weight"],
            loss_type=self.hparams["loss_type"],
            **arguments,
        )

    @property
    def _has_reference_point(self) -> bool:
        return self.hparams["loss_type"] == "kto"

    def _evaluated(self, batch: UnpairedBatch, kl: Tensor) -> Tensor:
        result = self.loss(batch, self.answer_logprobs(self.policy, batch), self.reference_logprobs(batch), kl)
        self._sums = self._sums.to(self.device) + _class_sums(result.metrics)
        return result.loss

    # ------------------------------------------------------------------ hooks

    def on_train_start(self) -> None:
        """Compute what the reference says, if it is not to be held; compare the classes' weights with their counts."""
        self._precompute(self.trainer.train_dataloader)
        self._precompute(self.trainer.val_dataloaders)
        labels = [wanted for part in _unpaired_examples(self.trainer.train_dataloader) for wanted in part.desirable]
        self.check_weights(sum(labels), len(labels) - sum(labels))

    def check_weights(self, desirable: int, undesirable: int) -> None:
        """Warn of weights that let one class drown the other.

        Args:
            desirable: Number of desirable answers in the data.
            undesirable: Number of the others.
        """
        good, bad = self.hparams["desirable_weight"], self.hparams["undesirable_weight"]
        if not (desirable and undesirable and good and bad):
            return
        ratio, (low, high) = good * desirable / (bad * undesirable), ADVISED_RATIO
        if low <= ratio <= high:
            return
        share = undesirable / desirable
        rank_zero_warn(
            f"the data has {desirable} desirable and {undesirable} undesirable answers; weighted by {good} and {bad} "
            f"they count {ratio:.2f} to 1, and the KTO paper advises {low} to {high}: use desirable_weight between "
            f"{low * bad * share:.2f} and {high * bad * share:.2f}, or undesirable_weight between "
            f"{good / share / high:.2f} and {good / share / low:.2f}"
        )

    def training_step(self, batch: UnpairedBatch, batch_idx: int) -> Tensor:
        """One micro-batch; the first of an optimizer step estimates the reference point of all."""
        if self._has_reference_point and batch_idx % self.trainer.accumulate_grad_batches == 0:
            self.kl.copy_(self.kl_estimate(batch.mismatched))
        loss = self._evaluated(batch, self.kl)
        self.log("loss", loss.detach(), prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log the means over the answers of the step."""
        self.log_dict(self._class_metrics(self.kl), on_step=True, on_epoch=False, batch_size=1)

    def on_validation_start(self) -> None:
        """Compute what the reference says about validation answers, unless that is known."""
        self._precompute(self.trainer.val_dataloaders)

    def on_validation_epoch_start(self) -> None:
        """Count anew."""
        self._training_sums, self._sums = self._sums, torch.zeros(6)

    def validation_step(self, batch: UnpairedBatch, batch_idx: int) -> None:
        """Mean loss over the validation answers; the first micro-batch estimates the reference point of all."""
        if self._has_reference_point and batch_idx == 0:
            self._validation_kl = self.kl_estimate(batch.mismatched)
        loss = self._evaluated(batch, self._validation_kl.to(self.device))
        self.log("val/loss", loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        """Log the means over the validation answers."""
        metrics = self._class_metrics(self._validation_kl)
        self.log_dict({f"val/{name}": value for name, value in metrics.items()}, batch_size=1)
        self._sums = self._training_sums

    def _class_metrics(self, kl: Tensor) -> dict[str, Tensor]:
        """Means of each class since the last call, over all ranks. A collective."""
        chosen_rewards, rejected_rewards, chosen_logps, rejected_logps, chosen, rejected = self._summed(self._sums)
        self._sums = torch.zeros_like(self._sums)
        means = {
            "rewards/chosen": chosen_rewards / chosen.clamp(min=1),
            "rewards/rejected": rejected_rewards / rejected.clamp(min=1),
            "logps/chosen": chosen_logps / chosen.clamp(min=1),
            "logps/rejected": rejected_logps / rejected.clamp(min=1),
            "count/chosen": chosen,
            "count/rejected": rejected,
        }
        means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means | ({"kl": kl} if self._has_reference_point else {})

    def predict_step(self, batch: UnpairedBatch, batch_idx: int) -> Tensor:
        """(B,) implicit rewards ``β (log π(y|x) - log π_ref(y|x))``."""
        with torch.no_grad():
            logratio = self.answer_logprobs(self.policy, batch) - self.reference_logprobs(batch)
        return self.hparams["beta"] * logratio.cpu()


def _unpaired_examples(loaders: Any) -> list[UnpairedExamples]:
    """Those behind one loader or several; a mixture has them as its sources."""
    found = []
    for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
        examples = getattr(loader, "examples", None)
        found += [part for part in getattr(examples, "sources", [examples]) if isinstance(part, UnpairedExamples)]
    return found


class _WithMismatched:
    """Each answer and its mismatched one as a pair, for the pass that computes what the reference says."""

    def __init__(self, examples: UnpairedExamples) -> None:
        self.examples = examples
        self.lengths = [2 * length for length in examples.lengths]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> PreferenceExample:
        example = self.examples[index]
        return PreferenceExample(example.answer, example.mismatched or example.answer)


def _class_sums(metrics: Mapping[str, Tensor]) -> Tensor:
    """(6,) sums behind the means of :func:`~rlhfkit.losses.kto_loss`: rewards, log-probs and counts of both classes."""
    counts = torch.stack([metrics["count/chosen"], metrics["count/rejected"]]).float()
    rewards = torch.stack([metrics["rewards/chosen"], metrics["rewards/rejected"]]).float()
    logps = torch.stack([metrics["logps/chosen"], metrics["logps/rejected"]]).float()
    return torch.cat([rewards * counts, logps * counts, counts])
