"""Small SFT runs of 50 optimizer steps, for this process and for ranks of their own."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import torch
from tiny_models import tiny_model

from rlhfkit import Optimization, SFTDataModule, SFTModule
from rlhfkit.models import ModelLoading

RANKS = int(os.environ.get("WORLD_SIZE", 1))
STEP, STEPS = 8, 50
"""Examples per optimizer step (24 examples: three steps an epoch), and how many steps a run has."""
BUDGET = 64
"""Tokens per micro-batch where a budget is asked for; 4 micro-batches a step then."""


class Losses(L.Callback):
    """The loss of each optimizer step, over all micro-batches and ranks."""

    def __init__(self) -> None:
        self.steps: dict[int, torch.Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps[self.step] += outputs["loss"]  # divided by accumulate_grad_batches already

    def totals(self) -> list[float]:
        losses = torch.stack([self.steps[step] for step in range(STEPS)])
        if RANKS > 1:
            torch.distributed.all_reduce(losses)
        return (losses / RANKS).tolist()


def prepare(folder: Path) -> None:
    """A model and 24 examples of uneven lengths."""
    tiny_model(folder / "model", seed=1)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i * 7 % 13 + 1) + str(2 * i)} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": False}
    # In double precision a difference of formula cannot hide behind rounding that 50 steps have amplified.
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "precision": "64-true"} | arguments)


def trajectory(
    folder: Path,
    attention: str | None,
    accumulate: int,
    *,
    budget: bool = False,
    metrics: dict[str, float] | None = None,
) -> list[float]:
    """The losses of a run in steps of 8 examples, or of 4 micro-batches of a token budget, however they are split.

    What is logged in the end is put into ``metrics``.
    """
    losses = Losses()
    module = SFTModule(
        str(folder / "model"),
        lr=3e-3,
        loading=ModelLoading(attention=attention),
        optimization=Optimization(lr_schedule="cosine", warmup_steps=3),
    )
    size = {"max_tokens_per_micro_batch": BUDGET} if budget else {"micro_batch_size": STEP // accumulate // RANKS}
    data = SFTDataModule(str(folder / "data.jsonl"), max_length=BUDGET, cache_dir=folder / "cache", **size)
    strategy = "ddp" if RANKS > 1 else "auto"
    run = trainer(
        folder,
        devices=RANKS,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        callbacks=[losses],
        gradient_clip_val=1.0,
    )
    run.fit(module, data)
    assert run.global_step == STEPS
    if metrics is not None:
        metrics.update({name: float(value) for name, value in run.callback_metrics.items()})
    return losses.totals()


def on_ranks(folder: Path, place: str) -> dict[str, Any]:
    """What one of two ranks runs."""
    torch.set_num_threads(1)
    metrics: dict[str, float] = {}
    report: dict[str, Any] = {
        f"{attention}, {accumulate}": trajectory(Path(place), attention, accumulate, metrics=metrics)
        for attention, accumulate in ((None, 2), ("sdpa", 1))
    }
    report["metrics"] = metrics
    report["budget"] = trajectory(Path(place), None, 2, budget=True)
    return report
