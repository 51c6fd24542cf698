"""Losses in float32 on the device against float64 on the CPU, with the arguments of the simulated device's tests."""

from typing import Any

import torch
from simulated_device.loss_cases import FUNCTIONS, NAMES, arguments_of, called
from torch import Tensor
from torch.utils._pytree import tree_map

from gpu.comparing import Figures, distance

COMPILED = ("ppo_loss", "grpo_loss", "dpo_loss")
BOUND = 1e-4
"""Relative in norm. float32 gives 1e-5 at most: exponentials of log-ratios that are summed over a sequence."""


def placed(arguments: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    def move(value: Any) -> Any:
        return value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value

    return tree_map(move, arguments)


def test_every_function_gives_what_the_cpu_gives_in_float64_also_compiled_as_a_whole(
    device: str, figures: Figures
) -> None:
    backend = "inductor" if device == "cuda" else "eager"  # which compiles for seconds
    for name in NAMES:
        function, arguments = FUNCTIONS[name], arguments_of(name)
        exact = called(function, placed(arguments, "cpu", torch.float64))
        ways = {name: function}
        if name in COMPILED:
            ways[f"{name}, compiled"] = torch.compile(function, fullgraph=True, backend=backend)
        for way, computed in ways.items():
            figures(way, distance(called(computed, placed(arguments, device, torch.float32)), exact), BOUND)
