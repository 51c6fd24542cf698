"""The load-balancing loss of mixtures of experts, by each family's own function, or over the tokens of a forward group.

    ``experts * sum_e share_e * probability_e``

(Fedus et al., 2021, arXiv:2101.03961), where ``share_e`` is the part of tokens (in all layers) that expert e is chosen
for, so that shares sum to the experts per token, and ``probability_e`` the router's mean probability of it. It is a
function of sums over tokens: where several ranks compute a forward pass together, each gives the owners of tokens the
sums over those that it has computed.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.models.parallel.joined_rows import JoinedRow

NO_ROUTER = "{} has no router with a load-balancing loss: leave RouterLoss out"


def has_router(model: nn.Module) -> bool:
    """Whether a model, bare or wrapped, is a mixture of experts with a load-balancing loss."""
    return any(_family_loss(kind) is not None for kind in {type(module) for module in model.modules()})


def router_loss(model: nn.Module, output: Any, joined: JoinedRow | None = None) -> Tensor:
    """Scalar load-balancing loss of a language model's output with ``output_router_logits``.

    Raises:
        ValueError: If the model has no router with such a loss, or see :func:`backbone_router_loss`.
    """
    if joined is not None:
        return backbone_router_loss(model, getattr(output, "router_logits", None), None, joined)
    found: Tensor | None = getattr(output, "aux_loss", None)
    if found is None:
        raise ValueError(NO_ROUTER.format(type(model).__name__))
    return found


def backbone_router_loss(
    backbone: nn.Module,
    router_logits: Sequence[Tensor] | None,
    attention_mask: Tensor | None,
    joined: JoinedRow | None = None,
) -> Tensor:
    """Scalar load-balancing loss of a backbone without a language-model head, by the family's own function.

    Args:
        backbone: Or a language model: its class names the family.
        router_logits: (N, experts) for each layer.
        attention_mask: (B, T), or ``None`` without padding.
        joined: Where a forward group computes the model together: the loss is then that of this rank's own tokens, and
            a collective of the members.

    Raises:
        ValueError: If the model is no mixture of experts, or its family has no such loss, or in a forward group one
            of another formula.
    """
    loss = _family_loss(type(backbone))
    if not router_logits or loss is None:
        raise ValueError(NO_ROUTER.format(type(backbone).__name__))
    experts = router_logits[0].shape[-1]
    chosen = cast(Any, backbone).config.get_text_config().num_experts_per_tok
    if joined is None:
        whole: Tensor = loss(tuple(router_logits), experts, chosen, attention_mask)
        return whole
    if not _has_usual_formula(loss):
        raise ValueError(
            f"the load-balancing loss of {type(backbone).__name__} has a formula of its own, which several ranks that "
            "compute a forward pass together cannot divide: leave RouterLoss out, or use sequence_parallel_size=1"
        )
    sums = _sums(router_logits, chosen, joined.members, joined.group.mesh.forward_group_size)
    return _loss_of(joined.sums_to_owners(sums))


def _sums(router_logits: Sequence[Tensor], chosen: int, members: Tensor, number: int) -> Tensor:
    """(members, 3, experts): how often each expert is chosen, its probabilities, and tokens, summed over layers.

    ``members`` (N,) int64 is whose each token is, of ``number``.
    """
    experts = router_logits[0].shape[-1]
    sums = router_logits[0].new_zeros(number, 3, experts, dtype=torch.float32)
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        picked = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(chosen, -1).indices, 1.0).detach()
        of_tokens = torch.stack([picked, probabilities, torch.ones_like(picked)], 1)
        sums = sums.index_add(0, members.to(logits.device), of_tokens.float())
    return sums


def _loss_of(sums: Tensor) -> Tensor:
    """Scalar loss from the sums (3, experts) over a batch."""
    chosen, probabilities, tokens = sums.unbind()
    return (chosen / tokens * (probabilities / tokens)).sum() * sums.shape[-1]


@cache
def _has_usual_formula(loss: Callable[..., Tensor]) -> bool:
    """Whether a family's function gives the loss from :func:`_sums`; tried on a few numbers."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    logits = [torch.randn(7, 5, generator=generator, device="cpu") for _ in range(3)]
    own = _loss_of(_sums(logits, 2, torch.zeros(7, dtype=torch.int64, device="cpu"), 1)[0])
    return bool(torch.allclose(loss(tuple(logits), 5, 2, None), own))


def _family_loss(kind: type) -> Callable[..., Tensor] | None:
    """Transformers' function in the file of a model's class, if it has the usual signature (Doge's has another)."""
    loss = getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)
    return None if loss is None or "num_keys" in inspect.signature(loss).parameters else loss
