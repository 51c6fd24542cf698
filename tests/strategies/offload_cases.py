"""Training states that go to CPU memory before every batch, on real ranks with DeepSpeed."""

import gc
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from rlhfkit.strategies.deepspeed.engines import tensors_in
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy
from strategies.toys import ShareLoader, Toy, global_batches, save_tiny_llama, trainer

SMALLEST = 512


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
        self.left: list[int] = []
        self.moved: list[dict[str, int]] = []
        self.resident: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        self.resident.append(sum(strategy.training_states.state_bytes().values()))
        if not self.active:
            return
        strategy.training_states.offload_states(weights=False)
        assert set(strategy.training_states.offloaded) <= {"gradients", "communication", "optimizer"}
        strategy.training_states.offload_states()
        strategy.training_states.offload_states()  # again: nothing is left to move
        self.moved.append(dict(strategy.training_states.offloaded))
        assert not any(strategy.training_states.state_bytes().values())
        host = {
            chunk.untyped_storage()._cdata
            for copies in strategy.training_states._copies.values()
            for chunk in copies._chunks
        }
        left = {key: size for key, size in storages().items() if key not in host and key not in self.others}
        self.left.append(sum(left.values()))
        strategy.training_states.reload_states(optimizer=False)
        assert set(strategy.training_states.offloaded) <= {"gradients", "communication", "optimizer"}
        strategy.training_states.reload_states()
        assert sum(strategy.training_states.state_bytes().values()) == self.resident[-1]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Saves in the middle, which needs what has been moved away."""
        strategy: Any = trainer.strategy
        if batch_idx == 3:
            if self.active:
                strategy.training_states.offload_states()
            trainer.save_checkpoint(self.checkpoint)
            assert not strategy.training_states.offloaded


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of all bits."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class Digests(pl.Callback):
    """Weights and optimizer states of both engines at the end."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        strategy: Any = trainer.strategy
        self.weights = {name: digest(strategy.consolidated_state_dict(name).values()) for name in strategy.engines}
        self.states = {
            name: digest(
                value
                for state in engine.basic_optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.ndim
            )
            for name, engine in strategy.engines.items()
        }


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


def saved(checkpoint: Path) -> dict[str, str]:
    """Digests of all tensors in the files of the engines."""
    states = {path: torch.load(path, weights_only=False) for path in sorted(checkpoint.glob("*/*/*.pt"))}
    assert len(states) >= 2
    return {str(path.relative_to(checkpoint)): digest(tensors_in(state)) for path, state in states.items()}


def train(checkpoint: Path, model: str, ranks: int, rank: int, *, active: bool, **options: Any) -> dict[str, Any]:
    """A policy, a critic and a frozen reference for three optimizer steps of two micro-batches."""
    settings = {"precision": "32-true", "stage": 2, "offload_optimizer": False} | options
    offloader, digests = Offloader(checkpoint, active=active), Digests()
    module = OwnMemory(model, critic=True, reference=True)
    strategy = RLHFDeepSpeedStrategy(stage=settings["stage"], offload_optimizer=settings["offload_optimizer"])
    run = trainer(
        strategy,
        ranks,
        precision=settings["precision"],
        callbacks=[offloader, digests],
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_model_summary=False,
    )
    run.fit(module, train_dataloaders=ShareLoader(global_batches(6), rank, ranks))
    return {
        "losses": module.losses,
        "weights": digests.weights,
        "states": digests.states,
        "saved": saved(checkpoint),
        "moved": offloader.moved,
        "left": offloader.left,
        "resident": offloader.resident,
    }


def compare(folder: Path, runs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Entry point of a rank: each run without and with offloading."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    model = save_tiny_llama(folder / f"model{rank}")
    return [
        [
            train(folder / f"{number}-{active}.ckpt", model, ranks, rank, active=active, **options)
            for active in (False, True)
        ]
        for number, options in enumerate(runs)
    ]
