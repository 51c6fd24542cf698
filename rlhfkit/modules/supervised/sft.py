"""``SFTModule`` and ``DFTModule``: supervised fine-tuning on the tokens that the data marks.

:class:`rlhfkit.SFTDataModule` marks completions, the assistant's turns, or whole texts as in pretraining.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.batch import TokenBatch
from rlhfkit.losses import LossOutput, aggregate, cross_entropy_loss, dft_loss
from rlhfkit.losses.metrics import share_metric
from rlhfkit.models import LoRA, PolicyOutput, policy_output
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.modules.supervised.neftune import embedding_noise
from rlhfkit.validation import check_number


class SFTModule(PolicyModule):
    """Supervised fine-tuning by cross-entropy.

    The loss is the mean over the trained tokens of the whole optimizer step, independent of micro-batches, ranks,
    padding and packing. Override :meth:`loss` for another objective on the same log-probs.

    Args:
        model: Folder or hub name of the policy.
        lr: Peak learning rate (5e-6: OpenRLHF's default for SFT).
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). See :class:`PolicyModule`.
        attention: ``None`` or ``auto``: packed with the first kernel that can run, where the model can be packed;
            ``varlen``, ``flash_attention_2``, ``flash_attention_3``, ``buckets``: packed with this one; else
            Transformers' ``attn_implementation`` (``sdpa``, ``eager``, ...), padded. See :class:`PolicyModule`.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters, not the model's own weights; ``None``: all weights, or the adapter that ``model``
            holds.
        neftune_alpha: NEFTune's α (5: Jain et al., 2023, arXiv:2310.05914): in training, uniform noise in ``±α / sqrt(L
            d)`` on embeddings of size d, with L the mean number of tokens of a micro-batch's sequences; 0: none.
        log_token_metrics: Log ``sft/token_accuracy``, the share of trained tokens that have the largest logit, and
            ``sft/entropy``, nats per token; takes one more matrix product of the output layer.
        **kwargs: See :class:`PolicyModule`.
    """

    batch_types = (TokenBatch,)

    def __init__(
        self,
        model: str,
        *,
        lr: float = 5e-6,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        neftune_alpha: float = 0.0,
        log_token_metrics: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )
        check_number("neftune_alpha", neftune_alpha, minimum=0)
        self.neftune_alpha = neftune_alpha
        self.log_token_metrics = log_token_metrics

    def policy_output(self, batch: TokenBatch) -> PolicyOutput:
        """Log-probs of the trained tokens under the policy."""
        balance = self.balances_routers
        more = self.log_token_metrics
        return policy_output(
            self.policy,
            batch,
            batch.loss_mask,
            entropy=more,
            correct=more,
            router_aux_loss=balance,
        )

    def token_metrics(self, batch: TokenBatch, out: PolicyOutput) -> dict[str, Tensor]:
        """Token accuracy and entropy, means over the trained tokens of a micro-batch, if they are logged."""
        values = {"token_accuracy": out.correct, "entropy": out.entropy}
        return {name: aggregate(value.detach(), batch.loss_mask) for name, value in values.items() if value is not None}

    def _noise(self, batch: TokenBatch, batch_idx: int) -> AbstractContextManager[None]:
        """NEFTune's noise on the embeddings of a micro-batch of training."""
        if not self.neftune_alpha:
            return nullcontext()
        length = batch.attention_mask.sum() / len(batch)
        seed = f"{self.current_epoch} {batch_idx} {self.global_rank}"
        return embedding_noise(self.policy, self.neftune_alpha, length, seed)

    def loss(self, batch: TokenBatch, out: PolicyOutput) -> LossOutput:
        """The loss of one micro-batch of B sequences; override it for another objective."""
        return cross_entropy_loss(out.logprobs, batch.loss_mask, denominator=batch.token_denominator)

    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        """Compute and log the loss of one micro-batch."""
        with self._noise(batch, batch_idx):
            out = self.policy_output(batch)
        result = self.loss(batch, out)
        result = self.with_router_loss(result, out.router_aux_loss, batch.loss_mask)
        tokens = batch.loss_mask.sum()
        self.log_step({"loss": share_metric(result.loss, tokens, batch.token_denominator)}, tokens)
        self.log_metrics(result.metrics, tokens, suffix="_epoch")
        self.log_metrics(self.token_metrics(batch, out), tokens, prefix="sft/")
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
        self.log_metrics(self.token_metrics(batch, out) | {"perplexity": perplexity}, tokens, prefix="val/")

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
