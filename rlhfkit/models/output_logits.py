"""How a causal language model computes its logits from the output layer: unchanged, scaled, soft-capped, or otherwise.

Gemma 2 caps its logits, Cohere, Granite and Falcon-H1 scale them, each under its own name, so the function is fitted to
results of the model's own code on known numbers.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhfkit.distributed import full_shape
from rlhfkit.losses.fused_head.tiles import matmul_dtype

log = logging.getLogger(__name__)

_TOKENS = 2
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


_KNOWN: "WeakKeyDictionary[nn.Module, OutputLogits | None]" = WeakKeyDictionary()


def output_logits(model: nn.Module) -> OutputLogits | None:
    """Find the scale and cap with which an unwrapped model computes its logits.

    ``None``, with a log message, if the model does anything else or its output layer is no plain linear layer. Done
    once per model by running its own code after its layers, which are replaced by known numbers; no weight is read, so
    it works on sharded and empty models. Checked against 2 x V numbers from 1e-3 to 1e4 on both sides of 0.
    """
    if model not in _KNOWN:
        _KNOWN[model] = found = _find(model)
        if found is None:
            log.warning(
                "the logits of %s are not its output layer's, scaled or capped: they are computed for every token and "
                "the whole vocabulary at once, which takes more memory",
                type(model).__name__,
            )
    return _KNOWN[model]


def _find(model: nn.Module) -> OutputLogits | None:
    hugging_face = cast(Any, model)
    layer, embedding = hugging_face.get_output_embeddings(), hugging_face.get_input_embeddings()
    backbones = [child for child in model.children() if any(inner is embedding for inner in child.modules())]
    if type(layer).forward is not nn.Linear.forward or len(backbones) != 1:
        return None
    weight = layer.weight
    vocabulary, width = full_shape(weight)
    with torch.device("cpu" if weight.is_meta else weight.device):
        size = torch.logspace(-3, 4, _TOKENS * vocabulary, dtype=torch.float64)
        raw = size.view(1, _TOKENS, vocabulary) * (1.0 - 2.0 * (torch.arange(vocabulary) % 2))
        hidden = torch.zeros(1, _TOKENS, width, dtype=weight.dtype)
    try:
        found = _fit(raw, _logits_from(model, backbones[0], layer, hidden, raw))
        if found is None:
            return None
        few = raw[..., :3].float()  # as encoded by a forward pass: another dtype, and not V columns
        if _fits(found, few, _logits_from(model, backbones[0], layer, hidden, few)):
            return found
    except Exception as error:  # a family's code may fail on numbers it has not computed
        log.debug("%s: the code after the output layer does not run alone: %s", type(model).__name__, error)
    return None


def _logits_from(model: nn.Module, backbone: nn.Module, layer: nn.Module, hidden: Tensor, raw: Tensor) -> Tensor:
    """The logits that the model computes from the output layer's ``raw`` (1, T, n)."""
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    # Not model(...): an engine's hooks belong to real forward passes only.
    with torch.no_grad(), _stand_in(model, backbone, lambda: _Hidden(hidden)), _stand_in(model, layer, lambda: raw):
        return cast(Tensor, cast(Any, model).forward(input_ids=tokens, use_cache=False, return_dict=True).logits)


def _fit(raw: Tensor, logits: Any) -> OutputLogits | None:
    if not isinstance(logits, Tensor) or logits.shape != raw.shape:
        return None
    points, values = raw.flatten(), logits.double().flatten()
    scale = float(values[0] / points[0])
    largest = float(values.abs().max())
    if not 0.0 < scale < float("inf") or not 0.0 < largest < float("inf"):
        return None
    bounded = largest < 0.5 * scale * float(points.abs().max())
    if bounded:  # tanh(x) is x - x^3 / 3 at the smallest number
        scale *= 1.0 + (float(points[0]) * scale / largest) ** 2 / 3.0
    scale = 1.0 if abs(scale - 1.0) < 1e-7 else scale
    found = OutputLogits(scale, largest if bounded else None)
    return found if _fits(found, raw, logits) else None


def _fits(found: OutputLogits, raw: Tensor, logits: Any) -> bool:
    """Whether the logits are those of ``found``, in no narrower a dtype than ``raw``."""
    if not isinstance(logits, Tensor) or logits.shape != raw.shape or logits.dtype not in (raw.dtype, torch.float32):
        return False
    return torch.allclose(found.apply(raw).double(), logits.double(), rtol=1e-5, atol=1e-8)


class _Hidden:
    """The output of a backbone with hidden states only."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return (self.last_hidden_state,)[index]
        return self.last_hidden_state if index in (0, "last_hidden_state") else None


class _StandIn(nn.Module):
    """A module that returns a given result and has all other attributes of the module it replaces."""

    def __init__(self, original: nn.Module, result: Callable[[], Any]) -> None:
        super().__init__()
        self.__dict__["original"], self.__dict__["result"] = original, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["result"]()


@contextmanager
def _stand_in(model: nn.Module, original: nn.Module, result: Callable[[], Any]) -> Iterator[None]:
    """Replace a module of the model inside the context; none of its hooks run."""
    places = [(owner, key) for owner in model.modules() for key, child in owner._modules.items() if child is original]
    for owner, key in places:
        owner._modules[key] = _StandIn(original, result)
    try:
        yield
    finally:
        for owner, key in places:
            owner._modules[key] = original


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
