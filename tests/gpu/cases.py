"""What ranks run: each case on a device, and how far it is from the same case elsewhere, by name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from arguments import learning
from modules import data_runs
from simulated_device.test_training import difference
from step_cases import KINDS, STEP, Found, train
from tiny_models import tiny_model

from rlhfkit import Optimization, SFTDataModule, SFTModule
from rlhfkit.rollout import ModuleWeights

ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}


def apart(found: Found, expected: Found) -> dict[str, float]:
    """How far losses and weights are from those of another run."""
    losses = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    return {"losses": losses, "weights": difference(found.weights, expected.weights)}


def every_module(folder: Path, device: str, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Two steps of modules with each of their settings, beside those of the CPU."""
    learning.prepare(folder)
    found = {}
    for kind in kinds:
        for setting in range(len(KINDS[kind][2])):
            case = {"kind": kind, "setting": setting, "size": STEP // 2, "attention": None, "order": None}
            here = train(folder, **case, accelerator=ACCELERATORS[device])
            found[f"{kind} {setting}"] = apart(here, train(folder, **case))
    return found


def deepspeed(folder: Path, device: str, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Steps under strategies with these names, beside those of plain Lightning on the CPU."""
    learning.prepare(folder)
    found = {}
    for kind in ("dpo", "grpo"):  # with a reference; with an engine that is sent weights
        case = {"kind": kind, "setting": 0, "size": STEP // 2, "attention": None, "order": None}
        expected = train(folder, **case)
        for name in names:
            os.environ["WORLD_SIZE"] = "1"  # Lightning deletes it when a fit ends
            run = train(folder, **case, accelerator=ACCELERATORS[device], strategy=name)
            found[f"{kind}, {name}"] = apart(run, expected)
    assert torch.distributed.get_backend() == ("nccl" if device == "cuda" else "gloo")
    return found


class Published(L.Callback):
    """The weights as engines are sent them, when training begins and when it ends."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        weights = ModuleWeights(pl_module.policy)
        self.weights.append({name: tensor.detach().cpu().double().clone() for name, tensor in weights})

    on_train_end = on_train_start

    def moved(self) -> list[torch.Tensor]:
        start, end = self.weights
        return [end[name] - start[name] for name in sorted(end)]


def texts(folder: Path, module: Any, device: str, callbacks: Sequence[L.Callback], **arguments: Any) -> L.Trainer:
    """Two epochs of two steps each on eight sums."""
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i % 5) + str(2 * i)} for i in range(16)]
    path = arguments.pop("ckpt_path", None)
    trainer = data_runs.trainer(
        folder, accelerator=ACCELERATORS[device], accumulate_grad_batches=2, callbacks=list(callbacks), **arguments
    )
    trainer.fit(module, SFTDataModule(rows, micro_batch_size=4), ckpt_path=path)
    return trainer


def overflows(folder: Path, device: str) -> None:
    """fp16 whose first loss scale is too large: updates are skipped until it fits, and weights stay finite."""
    from deepspeed.accelerator import get_accelerator

    from rlhfkit import RLHFDeepSpeedStrategy

    if device == "cpu":  # torch computes in fp16 on every CPU, slowly; DeepSpeed asks for instructions for it
        type(get_accelerator()).is_fp16_supported = lambda self: True
    tiny_model(folder / "model")
    for stage in (0, 2, 3):
        os.environ["WORLD_SIZE"] = "1"
        strategy, published = RLHFDeepSpeedStrategy(stage=stage, initial_scale_power=20, hysteresis=1), Published()
        module = SFTModule(str(folder / "model"), lr=1e-2)
        trainer = texts(folder, module, device, [published], strategy=strategy, precision="16-true", max_epochs=4)
        assert all(bool(tensor.isfinite().all()) for tensor in published.weights[-1].values()), stage
        assert trainer.strategy.rescaled_updates + trainer.strategy.skipped_updates, stage  # type: ignore[attr-defined]
        assert any(bool(tensor.any()) for tensor in published.moved()), stage


class Reload(L.Callback):
    """After four micro-batches loads the engines with what a resume on another number of ranks would give them."""

    def __init__(self, path: Path) -> None:
        self.path, self.left = path, 4

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        from rlhfkit.strategies.checkpoint import universal
        from rlhfkit.strategies.checkpoint.directory import read_manifest

        self.left -= 1
        if self.left:
            return
        trainer.save_checkpoint(self.path)
        manifest = read_manifest(self.path)
        names = sorted(manifest["engines"])
        with universal.converted(self.path, names, manifest, timeout=60) as converted:
            for name in names:
                (tag,) = (entry.name for entry in (converted / name).iterdir() if entry.is_dir())
                universal.load_converted(trainer.strategy.engines[name], converted / name, tag)
        for optimizer in trainer.strategy.optimizers:
            optimizer.share_groups()


def resumed_on_other_ranks(folder: Path, device: str) -> dict[str, float]:
    """AdamW's fused kernel goes on where it was, at each stage: how far the weights' moves are apart."""
    from gpu.comparing import distance

    tiny_model(folder / "model")
    found = {}
    for stage in (1, 2, 3):
        ends = []
        for more in ([], [Reload(folder / f"saved{stage}.ckpt")]):
            os.environ["WORLD_SIZE"] = "1"
            published = Published()
            module = SFTModule(
                str(folder / "model"), lr=1e-3, optimization=Optimization(optimizer_arguments={"fused": True})
            )
            texts(folder, module, device, [published, *more], strategy=f"rlhf_zero{stage}")
            ends.append(published.moved())
        found[f"ZeRO {stage}"] = distance(*ends)
    return found
