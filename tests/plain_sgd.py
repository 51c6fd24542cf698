"""``PlainSGD``: an optimizer for tests of gradients."""

from typing import Any

import torch


class PlainSGD:
    """Mixed into a module: SGD moves in proportion to the gradient, which shows a wrong factor that Adam would hide."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=self.lr)
