"""``TokenMetrics``: how often the label is the likeliest token, and the entropy, of supervised fine-tuning."""

from typing import Any

from torch import Tensor

from rlhfkit.losses import aggregate
from rlhfkit.models import PolicyOutput
from rlhfkit.parts import Part


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
