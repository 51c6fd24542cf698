"""``ProcessRewardModule``: a process reward model, which scores every step of an answer."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import TokenBatch
from rlhfkit.data.formats import StepwiseBatch
from rlhfkit.losses import LossOutput, process_reward_loss
from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.models.distillation import word_log_odds, word_token
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.reward.base import ScalarModule
from rlhfkit.parts import GivenPart


class ProcessRewardModule(ScalarModule):
    """A process reward model, which predicts at the last token of each step the probability that the step is good.

    Let's Verify Step by Step, Lightman et al. (2023, arXiv:2305.20050), with hard labels; Math-Shepherd, Wang et al.
    (2023, arXiv:2312.08935), with soft ones. The loss is the mean over the steps of the whole optimizer step.

    The model is saved as a token classifier with two labels, 1 for *good* (TRL's format), and trained on the difference
    of its two outputs, which is equivalent to cross-entropy; it can score a step at any token. With ``words`` it is a
    language model instead, which continues a step with the first or the second word (Math-Shepherd's and OpenRLHF's
    format, ``reward_token_ids``): the loss is cross-entropy between the two, of the logits at the token that ends the
    step, ``-log softmax(z_+, z_-)``, which again depends on their difference alone.

    Args:
        model: Folder or hub name of a causal language model, or of a token classifier with two labels.
        lr: Peak learning rate (1e-6: OpenRLHF's default for process reward models).
        words: Words for a good and a bad step, such as ``("+", "-")``, each one token: the model is a language model.
            ``None``: it is a token classifier.
        head_std: Standard deviation of a new head, see :func:`~rlhfkit.models.load_scalar_model`; not with ``words``.
        optimization: Optimizer and schedule of the learning rate, see :class:`~rlhfkit.Optimization`.
        lora: Train adapters, not the model's own weights, see :class:`~rlhfkit.LoRA`.
        loading: Technical options of the model, see :class:`~rlhfkit.ModelLoading`.
        parts: More features, see :class:`~rlhfkit.modules.PolicyModule`.

    Raises:
        ValueError: If an argument is out of range; when the model is built, if a word is not one token.
    """

    stepwise: ClassVar[bool] = True

    batch_types = (StepwiseBatch,)
    without_dropout = True

    def __init__(
        self,
        model: str,
        *,
        lr: float = 1e-6,
        words: Sequence[str] | None = None,
        head_std: float | None = None,
        optimization: Optimization | None = None,
        lora: LoRA | None = None,
        loading: ModelLoading | None = None,
        parts: Sequence[GivenPart] = (),
    ) -> None:
        super().__init__(
            model, lr=lr, head_std=head_std, optimization=optimization, lora=lora, loading=loading, parts=parts
        )
        if words is not None and (isinstance(words, str) or len(words) != 2 or words[0] == words[1]):
            raise ValueError(f"words must be two different words, for good and for bad steps, got {words!r}")
        if words is not None and head_std is not None:
            raise ValueError("words are read from the model's own output layer, so that there is no head for head_std")
        self.words = None if words is None else (words[0], words[1])
        self.keep_plain(words=None if words is None else list(words))

    def build_policy(self) -> nn.Module:
        """Load the token classifier, or the language model with ``words``; override to wrap or change it."""
        if self.words is None:
            return super().build_policy()
        return PolicyModule.build_policy(self)

    @property
    def word_ids(self) -> tuple[int, int]:
        """Token ids of the two words; ValueError if one is not a token."""
        assert self.words is not None
        return word_token(self.tokenizer, self.words[0]), word_token(self.tokenizer, self.words[1])

    def configure_model(self) -> None:
        """Build the model, after the words were found in its tokenizer."""
        if self.words is not None:
            self.word_ids  # noqa: B018  # raises what is wrong before anything is loaded
        super().configure_model()

    def read(self, batch: TokenBatch, mask: Tensor) -> Tensor:
        """(B, T) float32 log-odds at the tokens of ``mask``, (B, T) bool; 0 at other tokens."""
        if self.words is None:
            return super().read(batch, mask)
        found = word_log_odds(self.policy, batch, mask, self.word_ids, router_aux_loss=self.balances_routers)
        self.router_loss = found.router_aux_loss
        return found.values

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
