"""How a causal language model computes its logits from the output layer: unchanged, scaled, soft-capped, or otherwise.

Gemma 2 caps its logits, Cohere, Granite and Falcon-H1 scale them, each under its own name in its configuration.
"""

import logging
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlhfkit.losses.fused_head.tiles import matmul_dtype
from rlhfkit.models.attention.families import is_known

log = logging.getLogger(__name__)

_TINY = {torch.float32: 2.0**-20, torch.float64: 2.0**-40}
"""Factors that bring numbers to where a soft cap is linear up to rounding; powers of 2 are exact."""


class OutputLogits(NamedTuple):
    """``logits = cap(scale * raw)`` of the output layer's ``raw``; ``cap(z) = softcap * tanh(z / softcap)`` if set."""

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits are the result of the output layer itself."""
        return self.scale == 1.0 and self.softcap is None

    def apply(self, raw: Tensor) -> Tensor:
        """Logits, of the shape and dtype of ``raw``."""
        if self.softcap is None:
            return raw if self.scale == 1.0 else raw * self.scale
        return (raw * (self.scale / self.softcap)).tanh() * self.softcap

    def encode(self, values: Tensor) -> Tensor:
        """Scale finite numbers so that the model's code after the output layer is linear on them, in at least float32.

        :meth:`decode` restores them from the model's logits.
        """
        if self.is_plain:
            return values
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values * (_TINY[values.dtype] / self.scale)

    def decode(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse of :meth:`encode` followed by the model's own code, in the given dtype."""
        return output if self.is_plain else (output / _TINY[output.dtype]).to(dtype)


_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_POWERS = {"granite": -1, "granitemoe": -1, "granitemoeshared": -1, "granitemoehybrid": -1, "hyperclovax": 1}
"""Families that divide their logits by ``logits_scaling``, or multiply; MiniCPM 3 divides hidden states by it."""


def output_logits(model: nn.Module) -> OutputLogits | None:
    """Read from an unwrapped model's configuration how it scales and caps its logits.

    ``None``, with a log message, if its output layer is no plain linear layer, or the model is of no tested family
    (:func:`~rlhfkit.models.attention.families.is_known`): its code may compute them otherwise.
    """
    text: Any = cast(Any, model).config.get_text_config()
    layer = cast(Any, model).get_output_embeddings()
    if type(layer).forward is not nn.Linear.forward or not is_known(model):
        _warn_once(type(model).__name__)
        return None
    found = {name: getattr(text, name, None) for name in (*_SOFT_CAPS, *_FACTORS, "logits_scaling")}
    scale = float(found["logits_scaling"] or 1.0) ** _POWERS.get(text.model_type, 0)
    for name in _FACTORS:
        scale *= found[name] or 1.0
    return OutputLogits(scale, next((float(cap) for cap in map(found.get, _SOFT_CAPS) if cap), None))


@cache
def _warn_once(name: str) -> None:
    log.warning(
        "the logits of %s may not be its output layer's, scaled or capped as its configuration says: they are computed "
        "for every token and the whole vocabulary at once, which takes more memory",
        name,
    )


@torch.no_grad()
def most_probable(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(M,) int64 tokens of the largest logits for hidden states (M, H), in blocks of rows of at most 64M logits.

    Scales and caps of logits are increasing functions, so those of the output layer itself are compared.
    """
    dtype = matmul_dtype(hidden, weight)
    layer = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = max(2**26 // weight.shape[0], 1)
    blocks = [nn.functional.linear(block.to(dtype), *layer).argmax(-1) for block in torch.split(hidden, rows)]
    return torch.cat(blocks) if blocks else hidden.new_zeros(0, dtype=torch.int64)
