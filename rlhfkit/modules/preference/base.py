"""``PreferenceModule``: what all modules that learn from pairs of answers share, whatever the loss."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.data.formats.preferences import PreferenceBatch
from rlhfkit.losses import LossOutput, sequence_logprobs
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.router_loss import with_router_loss


class PreferenceModule(PolicyModule):
    """A policy that learns which of two answers is better.

    A subclass says what the loss is (:meth:`loss`). Losses are means over the pairs of the whole optimizer step,
    whatever the micro-batches, ranks, padding or packing. Logged for the pairs of each step, as everybody names them:
    ``loss``, ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, ``rewards/accuracies`` (share of pairs
    whose chosen answer has the larger reward), ``logps/chosen``, ``logps/rejected`` (nats per answer); with ``_epoch``
    behind the name as exact means over the pairs of the epoch, and with ``val/`` in front over the validation pairs.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (1e-6: TRL's default for DPO).
        **kwargs: See :class:`PolicyModule`.
    """

    batch_types = (PreferenceBatch,)

    def __init__(self, model: str, *, lr: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(model, lr=lr, **kwargs)

    def build_policy(self) -> nn.Module:
        """Load the policy without dropout, which would add noise to the comparison of two answers."""
        policy = super().build_policy()
        disable_dropout(policy)
        return policy

    # ------------------------------------------------------------------ one micro-batch

    def prepare(self, batch: PreferenceBatch) -> PreferenceBatch:
        """Fill in what the loss needs beside the policy's own log-probs; nothing here.

        Args:
            batch: B pairs.
        """
        return batch

    def policy_output(self, batch: PreferenceBatch) -> PolicyOutput:
        """Log-probs of the tokens of both answers; what they have in common goes through the model once."""
        return policy_output(self.policy, batch, batch.loss_mask, router_aux_loss=self.balances_routers)

    def answer_logprobs(self, batch: PreferenceBatch, logprobs: Tensor) -> Tensor:
        """One number per answer from those of its tokens; of the policy and of a reference alike.

        Args:
            batch: B pairs.
            logprobs: (2B, T-1).

        Returns:
            (2B,) sums over the tokens of the answer.
        """
        return sequence_logprobs(logprobs, batch.loss_mask)

    def pair_arguments(self, batch: PreferenceBatch, out: PolicyOutput) -> dict[str, Any]:
        """What all pair losses take: log-probs and lengths of both answers, and the size of the optimizer step.

        Args:
            batch: B pairs.
            out: What the current policy says about them.

        Returns:
            Keyword arguments of, for example, :func:`~rlhfkit.losses.simpo_loss`.
        """
        logps, lengths = self.answer_logprobs(batch, out.logprobs), batch.loss_mask.sum(-1)
        return {
            "chosen": batch.chosen(logps),
            "rejected": batch.rejected(logps),
            "chosen_lengths": batch.chosen(lengths),
            "rejected_lengths": batch.rejected(lengths),
            "mean_chosen_length": batch.mean_chosen_length,
            "mask": batch.pair_mask,
            "denominator": batch.pair_denominator,
        }

    @abstractmethod
    def loss(self, batch: PreferenceBatch, out: PolicyOutput) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B pairs, as :meth:`prepare` has filled them in.
            out: What the current policy says about them.
        """

    # ------------------------------------------------------------------ hooks

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> Tensor:
        """One micro-batch."""
        pairs = int(batch.pair_mask.sum())  # before the forward pass, which the device would be waited for after
        batch = self.prepare(batch)
        out = self.policy_output(batch)
        coef = self.router_aux_loss_coef
        result = with_router_loss(self.loss(batch, out), out.router_aux_loss, batch.loss_mask, coef)
        self.log_step({"loss": result.loss.detach()})
        self.log_step(result.metrics, pairs)
        self.log_metrics(result.metrics, pairs, suffix="_epoch")
        return result.loss

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        """Mean loss and metrics over the validation pairs."""
        pairs = int(batch.pair_mask.sum())
        batch = self.prepare(batch)
        result = self.loss(batch, self.policy_output(batch))
        self.log("val/loss", result.loss, prog_bar=True, on_epoch=True, sync_dist=True, batch_size=1)
        self.log_metrics(result.metrics, pairs, prefix="val/")

    def predict_step(self, batch: PreferenceBatch, batch_idx: int) -> dict[str, Tensor]:
        """Log-probs of both answers of each pair, ``logps/chosen`` and ``logps/rejected``, (B,) each."""
        with torch.no_grad():
            batch = self.prepare(batch)
            logps = self.answer_logprobs(batch, self.policy_output(batch).logprobs)
        return {"logps/chosen": batch.chosen(logps).cpu(), "logps/rejected": batch.rejected(logps).cpu()}
