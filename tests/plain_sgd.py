"""SGD for tests of gradients: as the optimizer of a module, and by hand."""

from typing import Any

import torch


class PlainSGD:
    """Mixed into a module: SGD moves in proportion to the gradient, which shows a wrong factor that Adam would hide."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=self.lr)


@torch.no_grad()
def sgd_by_hand(*models: torch.nn.Module, lr: float) -> None:
    """One step of models, of which one may be a part of another; their gradients are then gone."""
    for parameter in {parameter for model in models for parameter in model.parameters()}:
        if parameter.grad is not None:
            parameter -= lr * parameter.grad
            parameter.grad = None
