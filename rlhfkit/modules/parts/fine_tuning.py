"""Parts of supervised fine-tuning: ``NEFTune``, noise on the embeddings, and ``TokenMetrics``, accuracy and entropy."""

import random
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.losses import aggregate
from rlhfkit.models import PolicyOutput
from rlhfkit.models.forward import unwrap
from rlhfkit.parts import Part
from rlhfkit.validation import check_number


class NEFTune(Part):
    """Adds uniform noise to the policy's embeddings in training (Jain et al., 2023, arXiv:2310.05914).

    Each number of an embedding of size d gets noise in ``±α / sqrt(L d)``, with L the mean number of tokens of a
    micro-batch's sequences. A resumed run draws the same noise. Example::

        SFTModule("Qwen/Qwen3-0.6B", parts=[NEFTune(5.0)])

    Args:
        alpha: α (5 in the paper, 10 and 15 for larger data sets).

    Raises:
        ValueError: If it is not positive.
    """

    def __init__(self, alpha: float = 5.0) -> None:
        check_number("NEFTune.alpha", alpha, above=0)
        self.alpha = alpha
        self._handle: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add noise to what the embedding layer computes with gradient until the micro-batch ends."""
        layer = cast(Any, unwrap(pl_module.policy)).get_input_embeddings()
        length = batch.attention_mask.sum() / len(batch)
        number = random.Random(f"{pl_module.current_epoch} {batch_idx} {pl_module.global_rank}").getrandbits(62)

        def add(layer: nn.Module, _inputs: Any, embeddings: Tensor) -> Tensor:
            if not layer.training or not torch.is_grad_enabled():  # checks of rows, references
                return embeddings
            generator = torch.Generator(embeddings.device).manual_seed(number)
            noise = torch.empty(embeddings.shape, device=embeddings.device).uniform_(-1.0, 1.0, generator=generator)
            size: Tensor = self.alpha / (length * embeddings.shape[-1]).sqrt()
            noisy: Tensor = embeddings + (noise * size).to(embeddings.dtype)
            return noisy

        self._handle = layer.register_forward_hook(add)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Add none any more."""
        self._remove()

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        """Add none any more."""
        self._remove()

    def _remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class TokenMetrics(Part):
    """Logs means over the trained tokens, in training with the prefix ``sft/`` and in validation with ``val/``.

    ``token_accuracy``: the share of tokens that have the largest logit; ``entropy``: nats per token. They take one more
    matrix product of the output layer. Example::

        SFTModule("Qwen/Qwen3-0.6B", parts=[TokenMetrics()])
    """

    outputs = ("correct", "entropy")

    def observe(self, batch: Any, out: PolicyOutput, old: Any) -> dict[str, Tensor]:
        """Both, of a micro-batch."""
        assert out.correct is not None
        assert out.entropy is not None
        values = {"token_accuracy": out.correct, "entropy": out.entropy}
        return {name: aggregate(value.detach(), batch.loss_mask) for name, value in values.items()}
