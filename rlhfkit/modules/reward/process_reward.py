"""``ProcessRewardModule``: a model that judges every step of an answer."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhfkit.data.formats.stepwise import StepwiseBatch
from rlhfkit.losses import LossOutput, process_reward_loss
from rlhfkit.modules.reward.base import ScalarModule


class ProcessRewardModule(ScalarModule):
    """A process reward model: the probability that a step is good, read at the step's last token.

    Let's Verify Step by Step, Lightman et al. (2023, arXiv:2305.20050), with hard labels; Math-Shepherd, Wang et al.
    (2023, arXiv:2312.08935), with soft ones. The loss is the mean over the steps of the whole optimizer step.

    The model is saved as a token classifier with two labels, of which 1 is *good* (TRL's format). It is trained on the
    difference of the two outputs, which is all that their softmax depends on: value and gradient are those of
    cross-entropy on two labels. Unlike OpenRLHF's, no words of the vocabulary are spent on verdicts, so the (N, V)
    logits of a language model are never computed, and the same model can judge at any token.

    Args:
        model: Folder or hub name of a causal language model, or of a token classifier with two labels.
        lr: Peak learning rate (1e-6: OpenRLHF's default for process reward models).
        **kwargs: See :class:`~rlhfkit.modules.reward.base.ScalarModule`.
    """

    stepwise: ClassVar[bool] = True

    batch_types = (StepwiseBatch,)

    def __init__(self, model: str, *, lr: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(model, lr=lr, **kwargs)

    def scores(self, batch: StepwiseBatch) -> Tensor:
        """(B, T-1) float32 on the next-token axis: log-odds that the step is good which ends at token t+1."""
        return self.read(batch, batch.step_ends)[:, 1:]

    def loss(self, batch: StepwiseBatch, out: Tensor) -> LossOutput:
        """The objective of one micro-batch; the one method to override for another.

        Args:
            batch: B sequences.
            out: From :meth:`scores`.
        """
        return process_reward_loss(out, batch.labels, batch.loss_mask, denominator=batch.token_denominator)

    def claims(self, batch: StepwiseBatch, out: Tensor) -> tuple[Tensor, Tensor]:
        """Probability that a step is good, and its label."""
        return out[batch.loss_mask].sigmoid(), batch.labels[batch.loss_mask]

    def predict_step(self, batch: StepwiseBatch, batch_idx: int) -> list[Tensor]:
        """The probability that each step of each sequence is good."""
        with torch.no_grad():
            good = self.scores(batch).sigmoid()
        return [row[mask].cpu() for row, mask in zip(good, batch.loss_mask, strict=True)]
