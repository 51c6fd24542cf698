"""A small DPO run, for this process and for ranks of their own, and the same written by hand."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from rlhfkit import DPOModule, PreferenceDataModule

from .data_runs import Steps, answer_logprob, by_sgd, exact, trainer, write

RANKS = int(os.environ.get("WORLD_SIZE", 1))
STEP, LR = 8, 2e-3
"""Pairs per optimizer step: 24 pairs make three steps an epoch."""
KNOBS: dict[str, Any] = {"beta": 0.3, "label_smoothing": 0.1, "loss_type": {"sigmoid": 1.0, "sft": 0.5}}


class PlainDPO(PlainSGD, DPOModule):
    """DPO with SGD."""


def prepare(folder: Path) -> None:
    """A policy, another model as its reference, and 24 pairs of uneven lengths."""
    tiny_model(folder / "model", seed=1)
    tiny_model(folder / "reference", seed=0)
    rows = [
        {"prompt": f"{i}+{i}=", "chosen": "x" * (i % 5) + str(2 * i), "rejected": "y" * (i % 3 + 1)} for i in range(24)
    ]
    write(folder / "data.jsonl", rows)


def data(folder: Path, size: int, **arguments: Any) -> PreferenceDataModule:
    return PreferenceDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def fit(
    folder: Path,
    accumulate: int = 1,
    *,
    ranks: int = 1,
    module: dict[str, Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
    resume: str | None = None,
    **arguments: Any,
) -> Steps:
    """One run in steps of 8 pairs, however they are split, against another model unless ``module`` says otherwise."""
    steps = Steps()
    options = {"lr": LR, "ref_model": str(folder / "reference")} | KNOBS | (module or {})
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps, *callbacks], devices=ranks, **arguments)
    run.fit(PlainDPO(str(folder / "model"), **options), data(folder, STEP // accumulate // ranks), ckpt_path=resume)
    return steps


def by_hand(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the run, in float64 and plain Transformers, one text at a time."""
    source = data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    policy, reference = exact(folder / "model"), exact(folder / "reference")

    def loss_of(rows: list[Any]) -> Tensor:
        contrast, likelihood, tokens = torch.zeros(()).double(), torch.zeros(()).double(), 0
        for row in rows:
            chosen, rejected = (answer_logprob(policy, answer) for answer in (row.chosen, row.rejected))
            with torch.no_grad():
                anchor = answer_logprob(reference, row.chosen) - answer_logprob(reference, row.rejected)
            right = torch.sigmoid(KNOBS["beta"] * (chosen - rejected - anchor))
            contrast = contrast - 0.9 * right.log() - 0.1 * (1 - right).log()
            likelihood, tokens = likelihood - chosen, tokens + sum(row.chosen.loss_mask)
        return contrast / STEP + 0.5 * likelihood / tokens

    return by_sgd(policy, source.examples, loss_of, size=STEP, lr=LR), policy.state_dict()


def computed(cache: Path | str, **arguments: Any) -> dict[str, Any]:
    """Arguments of a module whose reference's log-probs are computed before training, and kept in a folder."""
    name = "rlhfkit.modules.parts.answer_reference.PrecomputedReference"
    return {"parts": [{"class_path": name, "init_args": {"cache": str(cache), **arguments}}]}


def moving(steps: int, alpha: float) -> list[dict[str, Any]]:
    """A ``MovingReference`` for every module that is made."""
    name = "rlhfkit.modules.parts.moving_reference.MovingReference"
    return [{"class_path": name, "init_args": {"steps": steps, "alpha": alpha}}]


FOLLOWING: dict[str, Any] = {"ref_model": None, "parts": moving(2, 0.75)}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "zero3, computed before": ("rlhf_zero3", 1, {"precompute_ref_log_probs": True, "ref_model": None}),
    "zero3, following": ("rlhf_zero3", 2, FOLLOWING),
    "ddp, following": ("ddp", 1, FOLLOWING),
    "ddp, computed before": ("ddp", 1, {"precompute_ref_log_probs": True, "ref_model": None}),
}
"""Strategy, micro-batches per step and rank, and arguments of the module.

References of ranks that share forward passes follow in mesh_ranks.py.
"""


def on_ranks(folder: Path, model: str) -> dict[str, Any]:
    """What one rank runs: all cases in one process group; rank 0 also writes the weights."""
    report: dict[str, Any] = {}
    for name, (strategy, accumulate, given) in CASES.items():
        options = dict(given)
        if options.pop("precompute_ref_log_probs", False):
            options |= computed(folder / name)
        saving: dict[str, Any] = {}
        if name == "zero3, following":  # a reference that moves, in shards
            saver = ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1)
            saving = {"callbacks": [saver], "enable_checkpointing": True}
        shared: dict[str, Any] = {"ranks": RANKS, "strategy": strategy, "num_nodes": 1, "module": options}
        steps = fit(Path(model), accumulate, **shared, **saving)
        report[name] = steps.totals
        if steps.weights:
            torch.save([steps.weights, steps.reference], folder / f"{name}.pt")
        if saving:
            rest = fit(Path(model), accumulate, **shared, resume=str(folder / "saved" / "epoch=0.ckpt"))
            report["stopped and resumed"] = rest.totals
    # In 16 bits the reference moves in float32, which rank 0 keeps of shards, and every rank of whole weights.
    for strategy in ("rlhf_zero3", "ddp"):
        saver = ModelCheckpoint(folder / f"half {strategy}", filename="{epoch}", save_top_k=-1)
        half: dict[str, Any] = {"ranks": RANKS, "strategy": strategy, "num_nodes": 1, "precision": "bf16-true"}
        half["module"] = FOLLOWING | {"parts": moving(1, 0.3), "lr": 0.1}
        whole = fit(Path(model), 1, **half, callbacks=[saver], enable_checkpointing=True)
        rest = fit(Path(model), 1, **half, resume=str(folder / f"half {strategy}" / "epoch=0.ckpt"))
        report[f"half {strategy}"] = [whole.losses, rest.losses]
        if whole.weights:
            torch.save([whole.reference, rest.reference], folder / f"half {strategy}.pt")
    return report
