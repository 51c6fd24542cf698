"""Modules under a Trainer on the simulated device and on the CPU."""

import logging
from pathlib import Path
from typing import Any

import torch
from arguments import learning
from step_cases import KINDS, STEP, train
from torch import Tensor

from simulated_device import trainer_arguments


class Warnings(logging.Handler):
    """What the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def every_module(folder: Path) -> dict[str, Any]:
    """Entry point: two optimizer steps of each module and setting on both devices, and the warnings."""
    torch.set_num_threads(1)
    learning.prepare(folder)
    warnings = Warnings()
    logging.getLogger("rlhfkit").addHandler(warnings)
    runs: dict[str, Any] = {}
    for kind, (_, _, settings) in KINDS.items():
        for setting in range(len(settings)):
            # On the simulated device first: what the library finds out about a family of models is kept.
            there = train(folder, kind, setting, size=STEP // 2, attention=None, order=None, **trainer_arguments())
            here = train(folder, kind, setting, size=STEP // 2, attention=None, order=None)
            runs[f"{kind} {setting}"] = {"losses": [there[0], here[0]], "weights": difference(there[1], here[1])}
    return {"runs": runs, "warnings": sorted(set(warnings.messages))}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two models, each number divided by its size where that is above 1."""
    assert found.keys() == expected.keys()
    scaled = [(found[name].cpu() - value).abs() / value.abs().clamp(min=1) for name, value in expected.items()]
    return max(float(one.max()) for one in scaled)
