"""What one rank runs: learning with adapters under DeepSpeed, exported in every way, at every ZeRO stage."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rl_runs import PlainGRPO, fit_run
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import HFExport, LoRA, SFTDataModule, SFTModule
from rlhfkit.callbacks import Probe
from rlhfkit.models import ModelLoading, policy_output

from .data_runs import trainer

RANK, WORLD = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

QLORA: dict[str, Any] = {"lora": LoRA(rank=4), "loading": ModelLoading(quantization="nf4")}


class Anchored(SFTModule):
    """Measures how far it has moved from where it started."""

    needs_reference = True  # type: ignore[assignment]  # a property of the base class

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad(), self.reference_model() as reference:
            start = policy_output(reference, batch, batch.loss_mask).logprobs
        now = self.policy_output(batch).logprobs.detach()
        self.__dict__.setdefault("moved", []).append(float((now - start).abs().max()))
        return super().training_step(batch, batch_idx)


class Watch(L.Callback):
    """What must hold in every iteration."""

    def __init__(self) -> None:
        self.report: dict[str, Any] = {"probes": [], "losses": [], "reference": []}
        self.start: Tensor | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.report["losses"].append(float(outputs["loss"]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        experience = trainer.callbacks[0].experience
        if trainer.current_epoch == 0:
            difference = (experience.columns["ref_logprobs"] - experience.rollout_logprobs)[experience.action_mask]
            self.report["reference"].append(float(difference.abs().max()))
        self.report["probes"].append(trainer.callbacks[0].part(Probe).difference)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.report["children"] = [name for name, _ in pl_module.named_children()]


class Save(L.Callback):
    """Saves the run after its last epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch + 1 == trainer.max_epochs:
            trainer.save_checkpoint(self.path)


def reinforce(folder: Path, strategy: str, lora: LoRA, world: int) -> dict[str, Any]:
    """Two iterations with a KL penalty; exported merged and as adapter, and saved as a checkpoint."""
    watch = Watch()
    fit_run(
        folder / f"rank{RANK}",  # ranks must not write the same model
        module=PlainGRPO,
        module_arguments={"lr": 0.5, "kl_coef": 0.05, "lora": lora},
        data_arguments={"micro_batch_size": 8 // world},
        callbacks=[
            watch,
            Save(folder / "lora.ckpt"),
            HFExport(folder / "merged"),
            HFExport(folder / "adapter", adapter=True),
        ],
        strategy=strategy,
        devices=world,
        use_distributed_sampler=False,
    )
    return watch.report


def supervise(
    folder: Path, data: str, model: str, strategy: str, world: int, name: str, **arguments: Any
) -> list[float]:
    """Three updates on data, saved as ``<name>.ckpt`` and exported to ``<name>``; distances from the start."""
    saving = [Save(folder / f"{name}.ckpt"), HFExport(folder / name)]
    options: Any = {"devices": world, "strategy": strategy, "use_distributed_sampler": False}
    run = trainer(folder, max_epochs=1, callbacks=saving, **options)
    examples = SFTDataModule(data, micro_batch_size=16 // world, max_length=32)
    module = Anchored(model, lr=1e-2, **arguments) if name == "further" else SFTModule(model, lr=1e-2, **arguments)
    run.fit(module, examples)
    return getattr(module, "moved", [])


def everything(folder: Path, model: str, data: str) -> dict[str, Any]:
    """All stages in one launch; DoRA at stage 3 and 1."""
    report = {}
    for stage in range(4):  # before there are ranks, of which Transformers would let only the first write
        tiny_model(folder / f"zero{stage}" / f"rank{RANK}" / "model")
    for stage in range(4):
        place = folder / f"zero{stage}"
        report[str(stage)] = reinforce(place, f"rlhf_zero{stage}", LoRA(rank=4, dora=stage % 2 == 1), WORLD)
        supervise(place, data, model, f"rlhf_zero{stage}", WORLD, "full")
        if stage >= 2:
            supervise(place, data, model, f"rlhf_zero{stage}", WORLD, "qlora", **QLORA)
            adapter = str(place / "adapter")
            report[str(stage)]["moved"] = supervise(place, data, adapter, f"rlhf_zero{stage}", WORLD, "further")
    return report
