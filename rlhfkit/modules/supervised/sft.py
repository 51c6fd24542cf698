"""``SFTModule`` and ``DFTModule``: supervised fine-tuning on the tokens that the data marks.

:class:`rlhfkit.SFTDataModule` marks completions, the assistant's turns, or whole texts as in pretraining.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhfkit.data.batch import TokenBatch
from rlhfkit.losses import LossOutput, cross_entropy_loss, dft_loss
from rlhfkit.losses.metrics import share_metric
from rlhfkit.models import LoRA, ModelLoading, PolicyOutput, policy_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart


class SFTModule(PolicyModule):
    """Supervised fine-tuning by cross-entropy.

    The loss is the mean over the trained tokens of the whole optimizer step, independent of micro-batches, ranks,
    padding and packing. Override :meth:`loss` for another objective on the same log-probs. Parts for it:
    :class:`~rlhfkit.modules.parts.fine_tuning.NEFTune`, :class:`~rlhfkit.modules.parts.fine_tuning.TokenMetrics`.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-6: OpenRLHF's default for SFT).
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.
    """

    batch_types = (TokenBatch,)

    def __init__(
        self,
        model: str,
        *,
        lr: float = 5e-6,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(model, lr=lr, optimization=optimization, lora=lora, loading=loading, parts=parts)
        self.attach_parts()

    def policy_output(self, batch: TokenBatch) -> PolicyOutput:
        """Log-probs of the trained tokens under the policy."""
        return policy_output(
            self.policy,
            batch,
            batch.loss_mask,
            entropy="entropy" in self.outputs,
            correct="correct" in self.outputs,
            router_aux_loss=self.balances_routers,
        )

    def loss(self, batch: TokenBatch, out: PolicyOutput) -> LossOutput:
        """The loss of one micro-batch of B sequences; override it for another objective."""
        return cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch."""
        out = self.policy_output(batch)
        result = self.with_terms(self.loss(batch, out), batch, out)
        tokens = batch.loss_mask.sum()
        self.log_step({"loss": share_metric(result.loss, tokens, batch.token_denominator)}, tokens)
        self.log_metrics(result.metrics, tokens, suffix="_epoch")
        self.log_metrics(self.observed(batch, out), tokens, prefix="sft/")
        return result.loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Log mean loss, negative log-likelihood and perplexity over all validation tokens."""
        out = self.policy_output(batch)
        tokens, denominator = batch.loss_mask.sum(), batch.token_denominator
        nll = cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=denominator).loss
        losses = {"loss": self.loss(batch, out).loss, "nll": nll}
        shares = {name: share_metric(value, tokens, denominator) for name, value in losses.items()}
        self.log_metrics(shares, tokens, prefix="val/", prog_bar=True)
        perplexity = share_metric(nll, tokens, denominator, exponential=True)
        self.log_metrics(self.observed(batch, out) | {"perplexity": perplexity}, tokens, prefix="val/")

    def predict_step(self, batch: TokenBatch, batch_idx: int) -> list[Tensor]:
        """Log-probs of the trained tokens of each sequence."""
        with torch.no_grad():
            out = self.policy_output(batch)
        return [row[mask].cpu() for row, mask in zip(out.logprobs, batch.loss_mask, strict=True)]


class DFTModule(SFTModule):
    """Dynamic fine-tuning: each token is weighted by its own probability, so that unlikely answers do not dominate.

    Wu et al. (2025, arXiv:2508.05629), see :func:`~rlhfkit.losses.dft_loss`. Arguments are those of :class:`SFTModule`.
    """

    def loss(self, batch: TokenBatch, out: PolicyOutput) -> LossOutput:
        """The loss of one micro-batch of B sequences; override it for another objective."""
        return dft_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator)
