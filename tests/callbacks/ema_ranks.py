"""A small supervised run whose weights are averaged, for this process and for ranks of their own."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from modules.data_runs import trainer
from rl_runs import SaveAt

from rlhfkit import EMA, SFTDataModule, SFTModule

RANKS = int(os.environ.get("WORLD_SIZE", 1))
DECAY = 0.8


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


def fit(folder: Path, ema: EMA, *, ranks: int = 1, path: Path | None = None, **arguments: Any) -> Spy:
    """Two epochs of three steps; ``path``: resume from there."""
    spy = Spy(ema)
    spies = [ema, *arguments.pop("callbacks", []), spy]
    source = str(folder / "data.jsonl")
    data = SFTDataModule(source, validation_data=source, micro_batch_size=8 // ranks, max_length=32)
    module = SFTModule(str(folder / "model"), lr=1e-2)
    trainer(folder, devices=ranks, callbacks=spies, **arguments).fit(module, data, ckpt_path=path)
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


def on_ranks(folder: Path, data: str, stages: list[int]) -> list[int]:
    """What one rank runs at each stage; returns how much it averages itself."""
    found = []
    for stage in stages:
        path = folder / f"stage{stage}.ckpt"
        saves = [SaveAt(path, batch=4), SaveAfterEpoch(folder / f"end{stage}.ckpt")]
        common = {"strategy": f"rlhf_zero{stage}", "ranks": RANKS}
        straight = fit(Path(data), EMA(DECAY), callbacks=saves, **common)
        assert straight.same_afterwards
        if straight.average:  # on rank 0
            assert difference(straight.average, averaged(straight.history)) < 1e-6
            assert difference(straight.average, straight.history[-1]) > 1e-3
            torch.save(straight.average, folder / f"average-{stage}.pt")
        assert difference(straight.validated[-1], straight.average) == 0.0
        if stage > 1:
            assert difference(fit(Path(data), EMA(DECAY), path=path, **common).average, straight.average) == 0.0
        found.append(sum(average.numel() for average in straight.ema.state_dict()["average"].values()))
    return found
