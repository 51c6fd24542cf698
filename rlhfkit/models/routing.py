"""Which experts the routers of a mixture chose: recorded in one forward pass, and replayed in later ones.

The weights of the chosen experts are computed anew from the router's own scores, so that the router learns; only the
choice is fixed. Without it, a token that moves to other experts between two updates changes its log-prob by a jump,
which importance ratios take for a change of the policy (routing replay: Zheng et al., 2025, arXiv:2507.18071, section
5.3; Ma et al., 2025, arXiv:2510.11370). Shapes: B sequences, T tokens, N tokens of a packed row, C = layers x experts
per token.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from rlhfkit.losses import mean_metric

_ATTACHED = "rlhfkit_routing"
"""Attribute of a model with the number of its routers, which are ready to be replayed."""


@dataclass
class Routing:
    """What the routers of a packed forward pass are told and say; part of its layout."""

    replayed: Tensor | None = None
    """(N, C) int64, by layer the numbers of the chosen experts plus 1; 0: the router chooses. ``None``: everywhere."""
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """By layer: (N, experts per token) int64, what its router has chosen, or was told to."""
    moved: dict[int, Tensor] = field(default_factory=dict)
    """By layer: (N,) bool, whether the router would have chosen other experts than it was told to."""

    def rerouted(self) -> Tensor | None:
        """Scalar metric, share of the choices that would be others now; ``None`` if none was replayed."""
        if not self.moved:
            return None
        moved = torch.stack([*self.moved.values()])
        return mean_metric(moved.float(), torch.ones_like(moved))


def attach_routing(model: nn.Module) -> None:
    """Make the routers of a bare Hugging Face model ready for :class:`Routing`; a second call does nothing.

    Raises:
        ValueError: If the model has no router that chooses by ``topk``.
    """
    if hasattr(model, _ATTACHED):
        return
    routers = list(_routers(model))
    if not routers:
        raise ValueError(
            f"{type(model).__name__} has no routers whose choice can be replayed: leave RouterReplay out. It is for "
            "mixtures of experts whose Transformers class records router_logits"
        )
    for number, (layer, router) in enumerate(routers):
        told = _Told(number, len(routers))
        router.forward = partial(_route, router.forward, told)
        layer.register_forward_pre_hook(partial(_tell, told), with_kwargs=True)
    setattr(model, _ATTACHED, len(routers))


def choices_per_token(model: nn.Module) -> int:
    """C, of a bare model with routing attached."""
    config: Any = model.config
    return int(getattr(model, _ATTACHED)) * int(config.get_text_config().num_experts_per_tok)


def tell_routers(model: nn.Module, inputs: dict[str, Any], routing: Tensor | bool) -> Routing:
    """Put into the ``inputs`` of a packed forward pass what its routers shall choose, or that they are recorded.

    Args:
        model: The bare model.
        inputs: Its keyword arguments; the layout is replaced.
        routing: (B, T-1, C), see :func:`packed_routing`; ``True``: only record.

    Raises:
        ValueError: If the model has no routing attached, is padded, or is computed by several ranks together.
    """
    layout = inputs.get("packed_layout")
    if not hasattr(model, _ATTACHED) or layout is None or layout.shared is not None:
        raise ValueError(
            f"routing of {type(model).__name__} needs attach_routing() and our packed attention on each rank alone: "
            "load the model with attention='auto', and leave sequence_parallel_size and tensor_parallel_size at 1"
        )
    told = Routing(None if isinstance(routing, bool) else packed_routing(routing, layout.tokens))
    inputs["packed_layout"] = dataclasses.replace(layout, routing=told)
    return told


def packed_routing(routing: Tensor, tokens: Tensor) -> Tensor:
    """(N, C) int64 of a packed row, from (B, T-1, C) of a batch and the row's (N,) ``tokens`` in the flattened (B, T).

    A sequence's last token is not in ``routing``, as nothing is predicted from it; its router chooses.
    """
    return pad(routing.long(), (0, 0, 0, 1)).flatten(0, 1)[tokens]


def batch_routing(routing: Routing, places: Tensor) -> Tensor:
    """(B, T-1, C) int16 of a batch, from what was chosen in a packed row and the (B, T) ``places`` of its tokens.

    Numbers of experts plus 1, as :attr:`Routing.replayed`. Padding has what the row's first token has.
    """
    chosen = torch.cat([routing.chosen[layer] for layer in sorted(routing.chosen)], -1)
    return (chosen + 1).to(torch.int16)[places.to(chosen.device)][:, :-1]


@dataclass
class _Told:
    """What one router is told for the forward pass of its layer that runs."""

    layer: int
    layers: int
    routing: Routing | None = None


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The routers that a model's class names, in order, each with the decoder layer that it is in."""
    kinds: list[type] = []
    for module in model.modules():
        recorders = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorders if isinstance(recorders, list | tuple) else [recorders]:
            kind = getattr(recorder, "target_class", None)
            if isinstance(kind, type) and kind is not nn.Linear:
                kinds.append(kind)
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in (layer for part in layers for layer in part):
        for module in layer.modules():
            if isinstance(module, tuple(kinds)):
                yield layer, module


def _tell(told: _Told, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Before a decoder layer, also where gradient checkpointing computes it again: read what its router is told."""
    layout = kwargs.get("packed_layout")
    told.routing = getattr(layout, "routing", None)


def _route(forward: Callable[..., Any], told: _Told, *args: Any, **kwargs: Any) -> Any:
    """A router's forward pass, in which the last choice of the largest scores is the one of experts."""
    routing = told.routing
    if routing is None:
        return forward(*args, **kwargs)
    replayed = None
    if routing.replayed is not None:
        replayed = routing.replayed.chunk(told.layers, -1)[told.layer]
    with _Choice(replayed) as choice:
        result = forward(*args, **kwargs)
    if choice.chosen is not None:
        routing.chosen[told.layer] = choice.chosen
    if choice.moved is not None:
        routing.moved[told.layer] = choice.moved
    return result


class _Choice(TorchFunctionMode):
    """Records what ``topk`` chooses, or replaces it.

    Routers with groups of experts choose groups first: among fewer scores, or other numbers of them, than the choice of
    experts, whose scores are those of all experts.
    """

    def __init__(self, replayed: Tensor | None) -> None:
        super().__init__()
        self.replayed = replayed
        self.chosen: Tensor | None = None
        self.moved: Tensor | None = None
        self._scores = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result.indices.dim() != 2:
            return result
        scores, free = args[0], result.indices
        if scores.shape[-1] < self._scores:
            return result
        self._scores = scores.shape[-1]
        if self.replayed is None or self.replayed.shape[-1] != free.shape[-1]:
            self.chosen = free.detach()
            return result
        told = self.replayed.to(free.device)
        self.chosen = torch.where(told > 0, told - 1, free)
        self.moved = (self.chosen.sort(-1).values != free.sort(-1).values).any(-1)
        return torch.return_types.topk((scores.gather(-1, self.chosen), self.chosen))
