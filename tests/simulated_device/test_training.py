"""Losses and modules give on the simulated device what they give on the CPU: no tensors of two devices meet."""

import copy
import logging
import shutil
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from arguments import learning
from plain_sgd import PlainSGD
from rl_runs import setup_run, weights
from step_cases import KINDS, STEP, train
from strategies import ranks
from torch import Tensor
from torch.utils._pytree import tree_map

from rlhfkit import EMA, GRPOModule, LoRA, NonFiniteGuard, OnPolicyDistillationModule, PPOModule
from rlhfkit.modules.parts import Correction, RewardModel
from rlhfkit.modules.parts.kl_penalty import KLInReward
from rlhfkit.modules.parts.routers import RouterLoss
from simulated_device import HostWaits, SimulatedTensor, record_host_waits, register, trainer_arguments
from simulated_device.loss_cases import FUNCTIONS, NAMES, arguments_of, called

ON_HOST = {"best_and_worst", "density_ratio_weights"}  # of an iteration or a data set, before its first update


@pytest.mark.distributed
@pytest.mark.parametrize("activity", ["every_function", "every_module", "further_settings"])
def test_the_device_gives_what_the_cpu_gives(activity: str, tmp_path: Path) -> None:
    ranks.run(f"simulated_device.test_training:{activity}", ranks=1, folder=tmp_path)


def every_function(folder: Path) -> None:
    """Losses stay on the device, forward and backward, and do not wait."""
    register()
    for name in NAMES:
        function, arguments = FUNCTIONS[name], arguments_of(name)
        expected = called(function, arguments)
        moved = tree_map(lambda one: one.to("sim") if isinstance(one, Tensor) else one, arguments)
        with record_host_waits() as waits:
            found = called(function, moved)
        assert found, name
        assert all(isinstance(one, SimulatedTensor) for one in found), name
        values: Any = [one.values for one in found]  # type: ignore[attr-defined]
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, equal_nan=True, msg=f"{name}: {{}}".format)
        assert not waits or name in ON_HOST, (name, waits.lines)


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


def every_module(folder: Path) -> None:
    """Two optimizer steps of each module and setting, of which the second does not wait, and no slower way."""
    torch.set_num_threads(1)
    learning.prepare(folder)
    said = BufferingHandler(capacity=10**6)
    logging.getLogger("rlhfkit").addHandler(said)
    for kind, (_, _, settings) in KINDS.items():
        for setting in range(len(settings)):
            # On the simulated device first: what the library finds out about a family of models is kept.
            case = {"kind": kind, "setting": setting, "size": STEP // 2, "attention": None, "order": None}
            second = SecondStep()
            with record_host_waits() as second.waits:
                there = train(folder, **case, callbacks=[second], **trainer_arguments())
            here = train(folder, **case)
            # Up to rounding: PyTorch's attention on the device of another backend is the plain one, in another order.
            assert there.losses == pytest.approx(here.losses, rel=1e-5, abs=1e-6), case
            assert difference(there.weights, here.weights) < 5e-5, case
            assert second.found() == {}, case
    assert not [record for record in said.buffer if record.levelno >= logging.WARNING and "slow" in record.getMessage()]


def further_settings(folder: Path) -> None:
    """Iterations with what a Trainer is used with besides."""
    torch.set_num_threads(1)
    learning.prepare(folder)
    validation = [{"prompt": f"{i}-1=", "answer": str(i - 1)} for i in range(4)]
    settings: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
        "adapters, corrected for the engine, recomputed activations, clipped and guarded": (
            GRPOModule,
            {
                "lora": LoRA(rank=4),
                "kl_coef": 0.01,
                "parts": [Correction("tis").plain()],
                "loading": {"gradient_checkpointing": True},
                "advantages": "rloo_advantages",
            },
            {"gradient_clip_val": 1.0, "callbacks": [NonFiniteGuard()]},
        ),
        "on-policy distillation": (OnPolicyDistillationModule, {"teacher": str(folder / "other")}, {}),
        "penalized in the reward, validated and averaged": (
            GRPOModule,
            {"parts": [RewardModel(str(folder / "scorer")).plain(), KLInReward(0.1).plain()]},
            {"data_arguments": {"validation_data": validation}, "callbacks": [EMA(decay=0.9, validate=False)]},
        ),
        "a mixture of experts, resumed": (PPOModule, {"parts": [RouterLoss(0.01).plain()]}, {}),
    }
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
        assert difference(*results) < 5e-5, name


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of two models, each number divided by its size where that is above 1."""
    assert found.keys() == expected.keys()
    scaled = [(found[name].cpu() - value).abs() / value.abs().clamp(min=1) for name, value in expected.items()]
    return max(float(one.max()) for one in scaled)
