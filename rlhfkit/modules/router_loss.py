"""The load-balancing loss of a mixture of experts, added to any loss."""

from torch import Tensor

from rlhfkit.losses import LossOutput


def with_router_loss(
    result: LossOutput, balance: Tensor | None, mask: Tensor, coef: float, *, name: str = "aux_loss"
) -> LossOutput:
    """Add the router's auxiliary loss.

    It is a mean over the tokens of a micro-batch and not linear in them, so, unlike the losses it is added to, it
    depends on how a step is split.

    Args:
        result: Any loss and its metrics.
        balance: The router's loss of the micro-batch, where ``coef`` is not 0.
        mask: Trained tokens; a micro-batch without any trains nothing, the router neither.
        coef: Its weight; 0: nothing is added.
        name: Of its metric.

    Returns:
        The sum, with the metric.

    Raises:
        ValueError: If there is no ``balance`` to weigh.
    """
    if not coef:
        return result
    if balance is None:
        raise ValueError(
            f"router_aux_loss_coef={coef} weighs a router's loss, and the forward pass gave none: an overridden "
            "policy_output() or scores() has to ask for it (router_aux_loss=self.balances_routers, or self.read)"
        )
    loss = result.loss + coef * balance * mask.any()
    return LossOutput(loss, {**result.metrics, name: balance.detach()})
