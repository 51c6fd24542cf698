"""The load-balancing loss of a mixture of experts, added to any loss."""

from torch import Tensor

from rlhfkit.losses import LossOutput
from rlhfkit.models import PolicyOutput


def with_router_loss(result: LossOutput, out: PolicyOutput, mask: Tensor, coef: float) -> LossOutput:
    """Add the router's auxiliary loss.

    It is a mean over the tokens of a micro-batch and not linear in them, so, unlike the losses it is added to, it
    depends on how a step is split.

    Args:
        result: Any loss and its metrics.
        out: What the policy says, with the router's loss where ``coef`` is not 0.
        mask: Trained tokens; a micro-batch without any trains nothing, the router neither.
        coef: Its weight; 0: nothing is added.

    Returns:
        The sum, with the metric ``aux_loss``.
    """
    if not coef:
        return result
    assert out.router_aux_loss is not None
    loss = result.loss + coef * out.router_aux_loss * mask.any()
    return LossOutput(loss, {**result.metrics, "aux_loss": out.router_aux_loss.detach()})
