"""``SFTModule`` and ``DFTModule``: supervised fine-tuning on the tokens that the data marks.

What is learned is a matter of the data (:class:`rlhfkit.SFTDataModule`): completions, the assistant's turns, or whole
texts as in pretraining.
"""

from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.batch import TokenBatch
from rlhfkit.losses import LossOutput, cross_entropy_loss, dft_loss
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.router_loss import with_router_loss


class SFTModule(PolicyModule):
    """A policy that imitates.

    The loss is the mean over the trained tokens of the whole optimizer step, whatever the micro-batches, ranks, padding
    or packing. Override :meth:`loss` for another objective on the same log-probs, as :class:`DFTModule` does.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-6: OpenRLHF's default for SFT).
        **kwargs: See :class:`PolicyModule`.
    """

    batch_types = (TokenBatch,)

    def __init__(self, model: str, *, lr: float = 5e-6, **kwargs: Any) -> None:
        super().__init__(model, lr=lr, **kwargs)

    def policy_output(self, batch: TokenBatch) -> PolicyOutput:
        """Log-probs of the trained tokens."""
        return policy_output(self.policy, batch, batch.loss_mask, router_aux_loss=self.balances_routers)

    def loss(self, batch: TokenBatch, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B sequences.
            out: What the current policy says about them.
        """
        return cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """One micro-batch."""
        out = self.policy_output(batch)
        coef = self.router_aux_loss_coef
        result = with_router_loss(self.loss(batch, out), out.router_aux_loss, batch.loss_mask, coef)
        self.log_step({"loss": result.loss.detach()})
        self.log_metrics(result.metrics, batch.loss_mask.sum(), suffix="_epoch")
        return result.loss

    def validation_step(self, batch: TokenBatch, batch_idx: int) -> None:
        """Mean loss and perplexity over the validation tokens, the same however they are split."""
        out = self.policy_output(batch)
        nll = cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator).loss
        losses = {"val/loss": self.loss(batch, out).loss, "val/nll": nll}
        self.log_dict(losses, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        """Perplexity, which is no mean over batches."""
        nll = self.trainer.callback_metrics.get("val/nll")
        if nll is not None:
            self.log("val/perplexity", nll.exp())

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
        """The objective of one micro-batch.

        Args:
            batch: B sequences.
            out: What the current policy says about them.
        """
        return dft_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator)
