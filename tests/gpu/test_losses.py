"""Losses in float32 on the device against float64 on the CPU, with the arguments of the simulated device's tests."""

from typing import Any

import pytest
import torch
from simulated_device.loss_cases import FUNCTIONS, NAMES, arguments_of, called
from torch import Tensor
from torch.utils._pytree import tree_map

from gpu.comparing import Figures, distance

BOUND = 1e-4
"""Relative in norm. float32 gives 1e-5 at most: exponentials of log-ratios that are summed over a sequence."""


def placed(arguments: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, Any]:
    def move(value: Any) -> Any:
        return value.to(device, dtype if value.is_floating_point() else None) if isinstance(value, Tensor) else value

    return tree_map(move, arguments)


def test_every_function_gives_what_the_cpu_gives_in_float64(device: str, figures: Figures) -> None:
    for name in NAMES:
        function, arguments = FUNCTIONS[name], arguments_of(name)
        exact = called(function, placed(arguments, "cpu", torch.float64))
        found = called(function, placed(arguments, device, torch.float32))
        figures(name, distance(found, exact), BOUND)


@pytest.mark.parametrize("name", ["ppo_loss", "grpo_loss", "dpo_loss"])
def test_a_loss_compiled_as_a_whole_gives_the_same(device: str, name: str, figures: Figures) -> None:
    function, arguments = FUNCTIONS[name], arguments_of(name)
    backend = "inductor" if device == "cuda" else "eager"  # which compiles for seconds
    exact = called(function, placed(arguments, "cpu", torch.float64))
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    figures(name, distance(called(compiled, placed(arguments, device, torch.float32)), exact), BOUND)
