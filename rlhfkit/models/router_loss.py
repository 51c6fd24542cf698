"""The load-balancing loss of a mixture of experts whose head is not that of a language model."""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn

NO_ROUTER = "{} has no router whose load could be balanced: use router_aux_loss_coef=0"


def has_router(model: nn.Module) -> bool:
    """Whether a model, bare or wrapped, is a mixture of experts whose load can be balanced."""
    return any(_family_loss(kind) is not None for kind in {type(module) for module in model.modules()})


def backbone_router_loss(
    backbone: nn.Module, router_logits: Sequence[Tensor] | None, attention_mask: Tensor | None
) -> Tensor:
    """The loss that the family's language model computes from its router logits, by the family's own function.

    Args:
        backbone: A Hugging Face model without a head.
        router_logits: What it gives for ``output_router_logits=True``: (N, experts) for each layer.
        attention_mask: (B, T) where the batch is padded, else ``None``.

    Returns:
        Scalar; ``experts * sum_e share_e * probability_e`` (Fedus et al., 2021, arXiv:2101.03961), where the shares sum
        to the number of experts that a token goes to.

    Raises:
        ValueError: If the model is no mixture of experts, or its family has no such loss.
    """
    loss = _family_loss(type(backbone))
    if not router_logits or loss is None:
        raise ValueError(NO_ROUTER.format(type(backbone).__name__))
    experts = router_logits[0].shape[-1]
    chosen = cast(Any, backbone).config.get_text_config().num_experts_per_tok
    return loss(tuple(router_logits), experts, chosen, attention_mask)


def _family_loss(kind: type) -> Callable[..., Tensor] | None:
    """Transformers' function in the file of a model's class, where its form is the usual one (not that of Doge)."""
    loss = getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)
    return None if loss is None or "num_keys" in inspect.signature(loss).parameters else loss
