"""``ProcessRewardModule``: a process reward model, which scores every step of an answer."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhfkit.data.formats.stepwise import StepwiseBatch
from rlhfkit.losses import LossOutput, process_reward_loss
from rlhfkit.models import LoRA
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.modules.reward.base import ScalarModule


class ProcessRewardModule(ScalarModule):
    """A process reward model, which predicts at the last token of each step the probability that the step is good.

    Let's Verify Step by Step, Lightman et al. (2023, arXiv:2305.20050), with hard labels; Math-Shepherd, Wang et al.
    (2023, arXiv:2312.08935), with soft ones. The loss is the mean over the steps of the whole optimizer step.

    The model is saved as a token classifier with two labels, 1 for *good* (TRL's format), and trained on the difference
    of its two outputs, which is equivalent to cross-entropy. Labels are not words of the vocabulary as in OpenRLHF, so
    (N, V) logits are never computed, and it can score a step at any token.

    Args:
        model: Folder or hub name of a causal language model, or of a token classifier with two labels.
        lr: Peak learning rate (1e-6: OpenRLHF's default for process reward models).
        head_std: Standard deviation of a new head, see :func:`~rlhfkit.models.load_scalar_model`.
        weight_decay: AdamW's decoupled weight decay.
        warmup_steps: Optimizer steps of linear warm-up.
        lr_schedule: After warm-up: ``constant``, ``linear`` or ``cosine``.
        attention: Transformers' ``attn_implementation``.
        gradient_checkpointing: Recompute activations in the backward pass.
        lora: Train adapters only.
        **kwargs: See :class:`PolicyModule`.
    """

    stepwise: ClassVar[bool] = True

    batch_types = (StepwiseBatch,)

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        head_std: float | None = None,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_schedule: Schedule = "constant",
        attention: str | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            model,
            lr=lr,
            head_std=head_std,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            lr_schedule=lr_schedule,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            **kwargs,
        )

    def scores(self, batch: StepwiseBatch) -> Tensor:
        """(B, T-1) float32 on the next-token axis: log-odds that the step that ends at token t+1 is good."""
        return self.read(batch, batch.step_ends)[:, 1:]

    def loss(self, batch: StepwiseBatch, out: Tensor) -> LossOutput:
        """The loss of one micro-batch of B sequences and their :meth:`scores`; override it for another objective."""
        return process_reward_loss(out, batch.labels, batch.loss_mask, denominator=batch.token_denominator)

    def predictions(self, batch: StepwiseBatch, out: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted probability that each step is good, and its label."""
        return out[batch.loss_mask].sigmoid(), batch.labels[batch.loss_mask]

    def number_of_cases(self, batch: StepwiseBatch, out: Tensor) -> Tensor:
        """Steps with a label."""
        return batch.loss_mask.sum()

    def predict_step(self, batch: StepwiseBatch, batch_idx: int) -> list[Tensor]:
        """Probabilities that the steps of each sequence are good."""
        with torch.no_grad():
            good = self.scores(batch).sigmoid()
        return [row[mask].cpu() for row, mask in zip(good, batch.loss_mask, strict=True)]
