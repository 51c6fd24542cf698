"""A small supervised run whose weights are averaged, for this process and for ranks of their own."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tiny_models import tiny_model

from rlhfkit import EMA, SFTDataModule, SFTModule

RANKS = int(os.environ.get("WORLD_SIZE", 1))
DECAY = 0.8


def prepare(folder: Path) -> None:
    """A model and 24 sums."""
    tiny_model(folder / "model")
    rows = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def weights(trainer: L.Trainer, module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Copies of all weights, from any strategy; empty on the other ranks of DeepSpeed."""
    if hasattr(trainer.strategy, "consolidated_state_dict"):
        return trainer.strategy.consolidated_state_dict("policy")
    return {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


class Spy(L.Callback):
    """The weights behind each optimizer step; at the end the average, and whether swapping it left a trace."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.history: list[dict[str, torch.Tensor]] = []
        self.average: dict[str, torch.Tensor] = {}
        self.validated: list[dict[str, torch.Tensor]] = []
        self.same_afterwards = False

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *rest: Any) -> None:
        if len(self.history) < trainer.global_step:
            self.history.append(weights(trainer, module))

    def on_validation_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(weights(trainer, module))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        before = [held(parameter).clone() for parameter in module.parameters()]
        with self.ema.applied(module):
            self.average = weights(trainer, module)
        after = [held(parameter) for parameter in module.parameters()]
        self.same_afterwards = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def held(parameter: Any) -> torch.Tensor:
    """What this rank holds of a parameter: all of it, or its ZeRO 3 shard."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def trainer(folder: Path, callbacks: list[L.Callback], **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "callbacks": callbacks} | arguments)


def fit(folder: Path, ema: EMA, *, ranks: int = 1, path: Path | None = None, **arguments: Any) -> Spy:
    """Two epochs of three steps; ``path``: resume from there."""
    spy = Spy(ema)
    spies = [ema, *arguments.pop("callbacks", []), spy]
    run = trainer(folder, spies, devices=ranks, **arguments)
    source = str(folder / "data.jsonl")
    data = SFTDataModule(source, validation_data=source, micro_batch_size=8 // ranks, max_length=32)
    run.fit(SFTModule(str(folder / "model"), lr=1e-2), data, ckpt_path=path)
    return spy


def averaged(history: list[dict[str, torch.Tensor]], decay: float = DECAY) -> dict[str, torch.Tensor]:
    """The definition, in float64."""
    factors = [decay ** (len(history) - 1 - k) for k in range(len(history))]
    return {
        name: sum(f * step[name].double() for f, step in zip(factors, history, strict=True)) / sum(factors)
        for name in history[0]
    }


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any weight."""
    return max(((one[name].double() - other[name].double()).abs().max().item() for name in one), default=0.0)


class SaveAfter(L.Callback):
    """A checkpoint behind an optimizer step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SaveAfterEpoch(L.Callback):
    """A checkpoint behind the first epoch: inside one, supervised data is not dealt to other ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class AverageAtStart(L.Callback):
    """This rank's share of the average when training starts."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema

    def on_train_start(self, *rest: Any) -> None:
        self.shares = {name: share.clone() for name, share in self.ema.state_dict()["average"].items()}


def on_other_ranks(folder: Path, data: str, place: str) -> dict[str, Any]:
    """Resume on one rank what two have saved at ZeRO 3."""
    ema = EMA(DECAY)
    start, path = AverageAtStart(ema), Path(place) / "end3.ckpt"
    resumed = fit(Path(data), ema, path=path, ranks=RANKS, strategy="rlhf_zero3", callbacks=[start])
    torch.save(start.shares, folder / "start.pt")
    torch.save(resumed.average, folder / "average.pt")
    return {}


def on_ranks(folder: Path, data: str, stages: list[int]) -> dict[str, Any]:
    """What one rank runs."""
    report: dict[str, Any] = {}
    for stage in stages:
        path = folder / f"stage{stage}.ckpt"
        saves = [SaveAfter(4, path), SaveAfterEpoch(folder / f"end{stage}.ckpt")]
        common = {"strategy": f"rlhf_zero{stage}", "ranks": RANKS}
        straight = fit(Path(data), EMA(DECAY), callbacks=saves, **common)
        resumed = fit(Path(data), EMA(DECAY), path=path, **common) if stage > 1 else straight
        report[str(stage)] = {
            "average": difference(straight.average, averaged(straight.history)) if straight.average else 0.0,
            "moved": difference(straight.average, straight.history[-1]),
            "validated": difference(straight.validated[-1], straight.average),
            "same_afterwards": straight.same_afterwards,
            "resumed": difference(resumed.average, straight.average),
            "saved": torch.save(straight.average, folder / f"average-{stage}.pt") if straight.average else None,
            "share": sum(average.numel() for average in straight.ema.state_dict()["average"].values()),
        }
    return report
