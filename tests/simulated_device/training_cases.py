"""Modules under a Trainer on the simulated device and on the CPU."""

import copy
import logging
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import torch
from arguments import learning
from plain_sgd import PlainSGD
from rl_runs import setup_run, weights
from step_cases import KINDS, STEP, train
from torch import Tensor

from rlhfkit import EMA, GRPOModule, LoRA, NonFiniteGuard, OnPolicyDistillationModule, PPOModule
from rlhfkit.modules.parts import Correction, RewardModel
from rlhfkit.modules.parts.kl_penalty import KLInReward
from rlhfkit.modules.parts.routers import RouterLoss
from simulated_device import HostWaits, record_host_waits, trainer_arguments


class Warnings(logging.Handler):
    """What the library warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class SecondStep(L.Callback):
    """The waits of the second of two optimizer steps: what every further step costs."""

    waits: HostWaits

    def __init__(self) -> None:
        self.ends: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(len(self.waits))

    def found(self) -> dict[str, int]:
        """How often each line waited, without those of the tests themselves."""
        step = HostWaits(self.waits[self.ends[len(self.ends) // 2 - 1] : self.ends[-1]])
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


def further_settings(folder: Path) -> dict[str, float]:
    """Entry point: iterations with what a Trainer is used with besides; how far the devices are apart."""
    torch.set_num_threads(1)
    learning.prepare(folder)
    validation = [{"prompt": f"{i}-1=", "answer": str(i - 1)} for i in range(4)]
    settings: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
        "adapters, clipped and guarded": (
            GRPOModule,
            {"lora": LoRA(rank=4), "kl_coef": 0.01},
            {"gradient_clip_val": 1.0, "callbacks": [NonFiniteGuard()]},
        ),
        "corrected for the engine, recomputed activations": (
            GRPOModule,
            {
                "parts": [Correction("tis").plain()],
                "loading": {"gradient_checkpointing": True},
                "advantages": "rloo_advantages",
            },
            {},
        ),
        "on-policy distillation": (OnPolicyDistillationModule, {"teacher": str(folder / "other")}, {}),
        "penalized in the reward, validated and averaged": (
            GRPOModule,
            {"parts": [RewardModel(str(folder / "scorer")).plain(), KLInReward(0.1).plain()]},
            {"data_arguments": {"validation_data": validation}, "callbacks": [EMA(decay=0.9, validate=False)]},
        ),
        "a mixture of experts, resumed": (PPOModule, {"parts": [RouterLoss(0.01).plain()]}, {}),
    }
    found = {}
    for number, (name, (module, arguments, trainer)) in enumerate(settings.items()):
        plain = type(f"Plain{module.__name__}", (PlainSGD, module), {})  # AdamW makes much of small differences
        results = []
        for device in ("sim", "cpu"):
            place, checkpoint = folder / f"{number}-{len(results)}", None
            shutil.copytree(folder / ("experts" if "experts" in name else "model"), place / "model")
            for epochs in (1, 2) if "resumed" in name else (2,):
                run, made, data, _ = setup_run(
                    place,
                    module=plain,
                    module_arguments={"lr": 0.05} | arguments,
                    max_epochs=epochs,
                    **copy.deepcopy(trainer),
                    **(trainer_arguments() if device == "sim" else {}),
                )
                run.fit(made, data, ckpt_path=checkpoint)
                checkpoint = place / "last.ckpt"
                run.save_checkpoint(checkpoint)
            results.append(weights(made))
        found[name] = difference(*results)
    return found


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two models, each number divided by its size where that is above 1."""
    assert found.keys() == expected.keys()
    scaled = [(found[name].cpu() - value).abs() / value.abs().clamp(min=1) for name, value in expected.items()]
    return max(float(one.max()) for one in scaled)
