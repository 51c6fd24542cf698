"""Training states in CPU memory while something else needs the device: equal runs, and no memory left behind.

Covers strategy.py.
"""

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from rlhfkit.strategies.deepspeed.engines import tensors_in
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy
from strategies.parity_cases import run, same
from strategies.ranks import on_two_ranks
from strategies.toys import Toy

SMALLEST = 512
CASES: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    *({"stage": stage, "precision": "bf16-true"} for stage in (0, 3)),
    {"stage": 2, "offload_optimizer": True},
]


def storages() -> dict[int, int]:
    """Sizes of the storages of all tensors that Python knows, by handle: independent of how states are found."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            if storage.nbytes() >= SMALLEST:
                found[storage._cdata] = storage.nbytes()
    return found


class Offloader(pl.Callback):
    """Moves the states away and back before each batch, so within accumulation windows too."""

    def __init__(self, checkpoint: Path, *, active: bool) -> None:
        self.checkpoint = checkpoint
        self.active = active
        gc.collect()
        self.others = storages()
        self.resident: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        states = strategy.training_states
        self.resident.append(sum(states.state_bytes().values()))
        if not self.active:
            return
        states.offload_states(weights=False)
        assert set(states.offloaded) <= {"gradients", "communication", "optimizer"}
        states.offload_states()
        states.offload_states()  # again: nothing is left to move
        assert not any(states.state_bytes().values())
        assert sum(states.offloaded.values()) == self.resident[-1]
        if batch_idx == 5:
            assert min(states.offloaded["weights"], states.offloaded["optimizer"]) > 80_000, states.offloaded
        host = {chunk.untyped_storage()._cdata for copies in states._copies.values() for chunk in copies._chunks}
        left = sum(size for key, size in storages().items() if key not in host and key not in self.others)
        # The batch, generators' states and other things smaller than any weight matrix.
        assert left < 30_000, f"{left} bytes of tensors are not moved"
        states.reload_states(optimizer=False)
        assert set(states.offloaded) <= {"gradients", "communication", "optimizer"}
        states.reload_states()
        assert sum(states.state_bytes().values()) == self.resident[-1]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves in the middle, which needs what has been moved away."""
        strategy: Any = trainer.strategy
        if batch_idx == 3:
            if self.active:
                strategy.training_states.offload_states()
            trainer.save_checkpoint(self.checkpoint)
            assert not strategy.training_states.offloaded

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        optimizers = [engine.basic_optimizer for engine in strategy.engines.values()]
        states = [value for one in optimizers for state in one.state.values() for value in state.values()]
        self.states = [value for value in states if isinstance(value, torch.Tensor) and value.ndim]


class OwnMemory(Toy):
    """``from_pretrained`` maps weights of a CPU from their file, and that memory cannot be freed.

    Two ranks share every parameter evenly: ZeRO 3 saves the padding of others, which nobody initialises.
    """

    def configure_model(self) -> None:
        super().configure_model()
        self.critic.value = nn.Linear(16, 1, bias=False)
        nn.init.constant_(self.critic.value.weight, 0.1)
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()


def train(checkpoint: Path, model: str, case: dict[str, Any], *, active: bool) -> dict[str, Any]:
    """A policy, a critic and a frozen reference for three optimizer steps of two micro-batches: all that is left."""
    stage, offload_optimizer, precision = case["stage"], case.get("offload_optimizer", False), case.get("precision")
    offloader = Offloader(checkpoint, active=active)
    spy = run(
        RLHFDeepSpeedStrategy(stage, offload_optimizer=offload_optimizer),
        model,
        1,
        [offloader],
        kind=OwnMemory,
        trainer={"precision": precision},
    )
    saved = [tensors_in(torch.load(path, weights_only=False)) for path in sorted(checkpoint.glob("*/*/*.pt"))]
    assert len(saved) >= 2
    return {
        "losses": spy.losses,
        "weights": spy.weights,
        "states": offloader.states,
        "saved": [list(tensors) for tensors in saved],
        "resident": offloader.resident,
    }


@on_two_ranks
def test_a_run_with_offloading_equals_one_without_bit_for_bit_and_no_other_tensor_keeps_memory(
    folder: Path, model: str
) -> None:
    """And so does a checkpoint that is saved meanwhile."""
    for number, case in enumerate(CASES):
        without, offloaded = (
            train(folder / f"{number}-{active}.ckpt", model, case, active=active) for active in (False, True)
        )
        for name, expected in without.items():
            assert same(offloaded[name], expected), f"{case}: {name}"
