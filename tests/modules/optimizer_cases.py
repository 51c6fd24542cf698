"""Short SFT runs with every optimizer, for this process and for ranks of their own."""

import math
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from strategies.parity_cases import full_weights

from rlhfkit import Optimization, SFTDataModule, SFTModule
from rlhfkit.strategies import RLHFDeepSpeedStrategy

from .data_runs import trainer

RANK, WORLD = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ROWS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i) + "y" * (i % 5)} for i in range(24)]
"""Three optimizer steps of eight rows an epoch."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {
        "lr": 0.3,
        "optimization": Optimization(
            optimizer="sgd",
            optimizer_arguments={"momentum": 0.9},
            parameter_options={"embeddings": {"lr": 0.03}, "vectors": {"weight_decay": 0.0}},
            weight_decay=0.1,
            lr_schedule="wsd",
            warmup_ratio=0.2,
            min_lr_ratio=0.1,
        ),
    },
    "muon": {
        "lr": 3e-3,
        "optimization": Optimization(optimizer="muon", weight_decay=0.1, lr_schedule="cosine", min_lr_ratio=0.1),
    },
    "torch.optim.Adafactor": {"lr": 3e-2, "optimization": Optimization(optimizer="torch.optim.Adafactor")},
    "adamw_8bit": {
        "lr": 3e-3,
        "optimization": Optimization(optimizer="adamw_8bit", optimizer_arguments={"min_8bit_size": 256}),
    },
    "adafactor": {"lr": 3e-2, "optimization": Optimization(optimizer="adafactor")},
}

TRAINERS: dict[str, dict[str, Any]] = {"muon": {"gradient_clip_val": 2.0}}
"""Arguments of the Trainer."""


class Keep(L.Callback):
    """Losses and learning rates of each step, and the weights in the end, while engines are there."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"losses": [], "rates": [], "norms": []}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.seen["losses"].append(float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean")))
        self.seen["rates"].append([group["lr"] for group in trainer.optimizers[0].param_groups])
        self.seen["norms"].append(float(trainer.callback_metrics.get("grad_norm/policy", 0.0)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen["weights"] = full_weights(pl_module, trainer.strategy, ["policy"])
        self.seen["put_together"] = put_together(trainer.strategy)


def put_together(strategy: Any) -> list[torch.Tensor]:
    """The weights that this rank owns, from the flat tensors of an optimizer that knows their layout."""
    found: list[torch.Tensor] = []
    for engine in getattr(strategy, "engines", {}).values():
        for flat, layout in getattr(engine.basic_optimizer, "flat_layouts", {}).items():
            layout.map_whole(lambda _, whole: found.append(whole.clone()) or whole, [flat.detach()])
    return found


def learn(
    folder: Path, model: str, name: str, strategy: Any, *, saved: Path | None = None, resume: Path | None = None,
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """What a run of two epochs shows, or its error; ``saved``: where to save it after the first."""
    keep = Keep()
    torch.manual_seed(1)
    ranks = 1 if strategy == "auto" else WORLD
    if strategy == "offload":
        strategy = RLHFDeepSpeedStrategy(stage=2, offload_optimizer=True)
    module = SFTModule(model, **OPTIMIZERS[name])
    options |= {"devices": ranks, "strategy": strategy, "use_distributed_sampler": False} | TRAINERS.get(name, {})
    run = trainer(folder, callbacks=[keep, *([] if saved is None else [SaveFirst(saved)])], **options)
    try:
        run.fit(module, SFTDataModule(ROWS, micro_batch_size=8 // ranks), ckpt_path=resume)
    except ValueError as error:
        return {"error": str(error)}
    return keep.seen


class SaveFirst(L.Callback):
    """Saves the run after the first epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of a weight."""
    if one.keys() != other.keys():
        return float("inf")
    return max((float((one[name].double() - other[name].double()).abs().max()) for name in one), default=0.0)


def gathered(result: dict[str, Any]) -> int:
    """How many weights of the model all ranks have put together; each is one of them."""
    parts: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(parts, result["put_together"])
    if RANK > 0:
        return 0
    wholes = list(result["weights"].values())
    return sum(any(torch.equal(part, whole) for whole in wholes) for each in parts for part in each)


def on_ranks(folder: Path, model: str, cases: list[list[Any]], resumed: list[list[Any]]) -> dict[str, Any]:
    """Each case (name of the optimizer, strategy, arguments of the Trainer) beside one rank without DeepSpeed.

    ``resumed``: cases of which a new run goes on after the first epoch of the straight one.
    """
    plain: dict[str, Any] = {}
    report = {}
    kept: dict[str, Any] = {}
    for name, strategy, options in cases:
        saved = folder / f"{name}, {strategy}.ckpt" if [name, strategy] in resumed and not options else None
        result = learn(folder, model, name, strategy, saved=saved, **options)
        key = f"{name}, {strategy}" + (f", {options}" if options else "")
        kept[key] = result
        if "error" in result:
            report[key] = result
            continue
        if name not in plain:
            plain[name] = learn(folder / f"plain{RANK}", model, name, "auto")
        alone = plain[name]
        report[key] = {
            "loss": max(abs(a - b) for a, b in zip(result["losses"], alone["losses"], strict=True)),
            "rates": result["rates"] == alone["rates"],
            "weight": difference(result["weights"], alone["weights"]) if RANK == 0 else 0.0,
            "moved": alone["losses"][0] - alone["losses"][-1],
            "put_together": gathered(result),
            "clipped": sum(
                norm > TRAINERS.get(name, {}).get("gradient_clip_val", math.inf) for norm in result["norms"]
            ),
        }
    for name, strategy in resumed:
        straight = kept[f"{name}, {strategy}"]
        after = learn(folder, model, name, strategy, resume=folder / f"{name}, {strategy}.ckpt")
        report[f"{name}, {strategy}, resumed"] = {
            "losses": after["losses"] == straight["losses"][3:],
            "rates": after["rates"] == straight["rates"][3:],
            "weight": difference(after["weights"], straight["weights"]) if RANK == 0 else 0.0,
        }
    return report
