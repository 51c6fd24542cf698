"""``Adafactor``: torch's, also for parameters that a strategy has divided."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rlhfkit.flat_parameters import FlatLayout
from rlhfkit.modules.optimizers.whole_parameters import WholeParameterOptimizer

_SETTINGS = ("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize")


class Adafactor(WholeParameterOptimizer, torch.optim.Adafactor):
    """torch's Adafactor (Shazeer and Stern, 2018, arXiv:1804.04235), with second moments by row and column only.

    Its step depends on the means of rows and columns, and on the norm of the parameter and of its update. Of parameters
    in flat tensors (:class:`~rlhfkit.flat_parameters.FlatLayout`), which ZeRO divides, one rank takes the step of a
    divided parameter, keeps its state, and gives each rank its part of the result.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters. A collective if they are divided over ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        try:
            self.param_groups = []
            for group in groups:
                for parameter in group["params"]:
                    layout = self.layout_of(parameter, group)
                    if layout is not None and parameter.grad is not None:
                        self._step_flat(parameter, layout, group)
                whole = [parameter for parameter in group["params"] if parameter not in self.flat_layouts]
                self.param_groups.append({**group, "params": whole})
            cast(Any, super()).step()  # torch 2.13 does not type it
        finally:
            self.param_groups = groups
        return loss

    @torch.no_grad()
    def _step_flat(self, flat: Tensor, layout: FlatLayout, group: Mapping[str, Any]) -> None:
        """Torch's step of the parameters that this rank owns; their states are those of torch, with a number."""
        assert flat.grad is not None
        state = self.state[flat]
        taken = state.get("step", torch.tensor(0.0))

        def stepped(number: int, weight: Tensor, gradient: Tensor) -> Tensor:
            parameter = torch.nn.Parameter(weight.clone())
            parameter.grad = gradient
            optimizer = torch.optim.Adafactor([parameter], **{key: group[key] for key in _SETTINGS})
            suffix = f".{number}"
            kept = {key.removesuffix(suffix): value for key, value in state.items() if key.endswith(suffix)}
            if kept:
                optimizer.state[parameter] = {
                    "step": taken.clone(),
                    **{k: v.to(weight.device) for k, v in kept.items()},
                }
            cast(Any, optimizer).step()
            new = {f"{key}{suffix}": value for key, value in optimizer.state[parameter].items() if key != "step"}
            state.update({key: value.to(flat.device) for key, value in new.items()})
            return parameter.detach()

        weights = layout.map_whole(stepped, [flat, flat.grad])
        for number in range(len(layout.shapes)):
            layout.own_part(number, flat).copy_(layout.own_part(number, weights))
        state["step"] = taken + 1
