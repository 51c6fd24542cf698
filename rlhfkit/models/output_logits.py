"""What a causal language model does with its logits behind the output layer: nothing, a factor, a soft cap, or more.

Gemma 2 caps them, Cohere, Granite and Falcon-H1 multiply them. Which names and conventions a family has for that is not
asked: the code behind the output layer is run on known numbers, and what it makes of them is what it does.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlhfkit.distributed import full_shape

log = logging.getLogger(__name__)

_TOKENS = 2
_TINY = {torch.float32: 2.0**-20, torch.float64: 2.0**-40}
"""Factors that bring numbers to where a soft cap is a straight line, to the rounding of the type; powers of 2 round
nothing themselves."""


class OutputLogits(NamedTuple):
    """``logits = cap(scale * raw)`` with ``cap(z) = c tanh(z / c)``, of the output layer's ``raw``.

    Attributes:
        scale: Factor on what the output layer gives.
        softcap: c; ``None``: no cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits are what the output layer gives."""
        return self.scale == 1.0 and self.softcap is None

    def apply(self, raw: Tensor) -> Tensor:
        """Logits, of the shape and type of what the output layer gives."""
        if self.softcap is None:
            return raw if self.scale == 1.0 else raw * self.scale
        return (raw * (self.scale / self.softcap)).tanh() * self.softcap

    def encode(self, values: Tensor) -> Tensor:
        """Prepare numbers that are no logits to pass through the model's own code behind the output layer.

        Args:
            values: Any shape, finite.

        Returns:
            Float32 at least, from which :meth:`decode` makes ``values`` again once the model has returned them.
        """
        if self.is_plain:
            return values
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values * (_TINY[values.dtype] / self.scale)

    def decode(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers that :meth:`encode` has prepared, after the model's own code, in their type again."""
        return output if self.is_plain else (output / _TINY[output.dtype]).to(dtype)


_KNOWN: "WeakKeyDictionary[nn.Module, OutputLogits | None]" = WeakKeyDictionary()


def output_logits(model: nn.Module) -> OutputLogits | None:
    """How a model makes logits of what its output layer gives.

    Found once per model by running the model's own code behind the layers, which are replaced meanwhile by numbers that
    are chosen; no weight is read, so a sharded or empty model will do. What is found is checked against 2 x V of them,
    from 1e-3 to 1e4 on both sides of 0.

    Args:
        model: A Hugging Face causal language model, without wrappers.

    Returns:
        Factor and cap; ``None`` if it does anything else, or its output layer is no plain linear layer: then only its
        own logits are right. That is logged.
    """
    if model not in _KNOWN:
        _KNOWN[model] = found = _find(model)
        if found is None:
            log.warning(
                "%s makes its logits in a way of its own: they are computed for every token and all of the vocabulary "
                "at once, which takes more memory",
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
        found = _fit(raw, _behind(model, backbones[0], layer, hidden, raw))
        if found is None:
            return None
        few = raw[..., :3].float()  # what a forward pass has instead of logits: another type, and not V of them
        if _fits(found, few, _behind(model, backbones[0], layer, hidden, few)):
            return found
    except Exception as error:  # whatever a family's code does with numbers it has not computed
        log.debug("%s: the code behind the output layer does not run alone: %s", type(model).__name__, error)
    return None


def _behind(model: nn.Module, backbone: nn.Module, layer: nn.Module, hidden: Tensor, raw: Tensor) -> Tensor:
    """What the model makes of the output layer's ``raw`` (1, T, n)."""
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    # Not model(...): hooks of engines around it belong to real forward passes.
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
    """Whether the logits are what was found, in no narrower a type than what they were made of."""
    if not isinstance(logits, Tensor) or logits.shape != raw.shape or logits.dtype not in (raw.dtype, torch.float32):
        return False
    return torch.allclose(found.apply(raw).double(), logits.double(), rtol=1e-5, atol=1e-8)


class _Hidden:
    """The output of a backbone of which only the hidden states are known."""

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
    """A module that gives what it is told to, and has all else from the one whose place it takes."""

    def __init__(self, original: nn.Module, result: Callable[[], Any]) -> None:
        super().__init__()
        self.__dict__["original"], self.__dict__["result"] = original, result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["result"]()


@contextmanager
def _stand_in(model: nn.Module, original: nn.Module, result: Callable[[], Any]) -> Iterator[None]:
    """Let another module be called in place of one of the model's for a while; no hook of it runs."""
    places = [(owner, key) for owner in model.modules() for key, child in owner._modules.items() if child is original]
    for owner, key in places:
        owner._modules[key] = _StandIn(original, result)
    try:
        yield
    finally:
        for owner, key in places:
            owner._modules[key] = original
