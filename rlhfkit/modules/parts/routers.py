"""Routers of a mixture of experts: ``RouterLoss`` balances their load, ``RouterReplay`` repeats their choices."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.losses import LossOutput, sum_losses
from rlhfkit.models import PolicyOutput
from rlhfkit.models.forward import unwrap
from rlhfkit.models.routing import attach_routing
from rlhfkit.parts import Part
from rlhfkit.validation import check_number


class RouterLoss(Part):
    """Adds the load-balancing loss of a mixture of experts in training, as Transformers computes it.

    Of the policy it is logged as ``aux_loss``, of PPO's critic as ``value/aux_loss``. It is a mean over a micro-batch's
    tokens and not linear in them, so it depends on the split into micro-batches. Example::

        SFTModule("Qwen/Qwen3-30B-A3B", parts=[RouterLoss(0.001)])

    Args:
        coef: Weight of the loss (0.001 in Transformers' configurations of Mixtral and Qwen).

    Raises:
        ValueError: If it is not above 0; in training, if a model has no router with such a loss.
    """

    outputs = ("router_loss",)

    def __init__(self, coef: float = 0.001) -> None:
        check_number("RouterLoss.coef", coef, above=0)
        self.coef = coef

    def balance(self, router_loss: Tensor | None, mask: Tensor, *, name: str = "aux_loss") -> LossOutput:
        """The weighted loss.

        Args:
            router_loss: Scalar, the router's loss of the micro-batch.
            mask: Trained tokens; a micro-batch without any does not train the router.
            name: Name of the metric.

        Raises:
            ValueError: If the router's loss is ``None``.
        """
        if router_loss is None:
            raise ValueError(
                f"RouterLoss({self.coef}) weights a router's loss, and the forward pass gave none: an overridden "
                "policy_output() or scores() has to ask for it (router_aux_loss=self.balances_routers, or self.read)"
            )
        return LossOutput(self.coef * router_loss * mask.any(), {name: router_loss.detach()})

    def term(self, batch: Any, out: Any, old: Tensor | None) -> LossOutput:
        """The loss of the policy's router."""
        mask = batch.action_mask if isinstance(batch, Experience) else batch.loss_mask
        found = out.router_aux_loss if isinstance(out, PolicyOutput) else self.module.router_loss
        return self.balance(found, mask)


def with_critic_router(module: Any, result: LossOutput, router_loss: Tensor, mask: Tensor) -> LossOutput:
    """Add the loss of a critic's router to that of its values, if the module has the part."""
    parts = [part for part in module.parts if isinstance(part, RouterLoss)]
    return sum_losses(result, *(part.balance(router_loss, mask, name="value/aux_loss") for part in parts))


class RouterReplay(Part):
    """Sends each token of later updates to the experts that the policy before the iteration chose.

    Their weights are computed anew (routing replay, GSPO: Zheng et al., 2025, arXiv:2507.18071, section 5.3). For
    mixtures of experts with our packed attention; takes 2 bytes for each choice of a token's layers, and no further
    forward pass. ``policy/rerouted_fraction`` is the share of choices that would be others now. Example::

        GRPOModule("Qwen/Qwen3-30B-A3B", parts=[RouterReplay()])

    Raises:
        ValueError: If the policy has no routers whose choice can be replayed.
    """

    reads = ("routing",)

    @torch.no_grad()
    def loaded(self) -> None:
        """Make the policy's routers ready."""
        attach_routing(unwrap(self.module.policy))

    def observe(self, batch: Experience, out: PolicyOutput, old: Tensor) -> Mapping[str, Any]:
        """The share of choices that would be others now, where they are replayed."""
        return {} if out.rerouted is None else {"policy/rerouted_fraction": out.rerouted}
