"""Modules under a Trainer on the simulated device and on the CPU."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from arguments import learning
from step_cases import KINDS, STEP, train
from torch import Tensor

from simulated_device import HostWaits, record_host_waits, trainer_arguments


class Warnings(logging.Handler):
    """What the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class SecondStep(L.Callback):
    """The waits of the second optimizer step, of two micro-batches: what every further step costs."""

    waits: HostWaits

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(len(self.waits))

    def found(self) -> dict[str, int]:
        """How often each line waited, without those of the tests themselves."""
        step = HostWaits(self.waits[self.ends[1] : self.ends[3]])
        return {line: count for line, count in step.lines.items() if not line.startswith("step_cases")}


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
            case = {"kind": kind, "setting": setting, "size": STEP // 2, "attention": None, "order": None}
            second = SecondStep()
            with record_host_waits() as second.waits:
                there = train(folder, **case, callbacks=[second], **trainer_arguments())
            here = train(folder, **case)
            runs[f"{kind} {setting}"] = {
                "losses": [there[0], here[0]],
                "weights": difference(there[1], here[1]),
                "waits": second.found(),
            }
    return {"runs": runs, "warnings": sorted(set(warnings.messages))}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two models, each number divided by its size where that is above 1."""
    assert found.keys() == expected.keys()
    scaled = [(found[name].cpu() - value).abs() / value.abs().clamp(min=1) for name, value in expected.items()]
    return max(float(one.max()) for one in scaled)
