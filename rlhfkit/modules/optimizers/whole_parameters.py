"""``WholeParameterOptimizer``: base of optimizers that compute with whole parameters, which a strategy may divide."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rlhfkit.distributed import full_shape
from rlhfkit.flat_parameters import FlatLayout


class WholeParameterOptimizer(Optimizer):
    """Takes whole parameters, or flat tensors of which a strategy says which parts of which parameters lie in them."""

    flat_layouts: Mapping[Tensor, FlatLayout] = {}

    def set_flat_layouts(self, layouts: Mapping[Tensor, FlatLayout]) -> None:
        """Take the layout of each flat tensor among the parameters."""
        self.flat_layouts = dict(layouts)

    def layout_of(self, parameter: Tensor, group: Mapping[str, Any]) -> FlatLayout | None:
        """The layout of a flat tensor of a group; ``None``: it is a whole parameter.

        Raises:
            ValueError: If it is flat where the optimizer needs to know its parameters, and nothing says which they are.
        """
        layout = self.flat_layouts.get(parameter)
        if layout is None and len(full_shape(parameter)) < self.least_dimensions(group):
            raise ValueError(
                f"{type(self).__name__} updates whole matrices and was given a tensor of shape "
                f"{tuple(parameter.shape)}: the strategy flattens or divides weights, and does not say how. Train with "
                "RLHFDeepSpeedStrategy or Trainer(strategy='ddp'), or take optimizer='adamw'"
            )
        return layout

    def least_dimensions(self, group: Mapping[str, Any]) -> int:
        """Dimensions that every parameter of a group has at least."""
        return 0

    def require_whole(self) -> None:
        """Raise ValueError if there is a flat tensor of unknown parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.layout_of(parameter, group)
