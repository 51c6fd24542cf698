"""A small DPO run, for this process and for ranks of their own, and the same written by hand."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import DPOModule, PreferenceDataModule
from rlhfkit.models import ModelLoading, load_causal_lm

RANKS = int(os.environ.get("WORLD_SIZE", 1))
STEP, LR = 8, 2e-3
"""Pairs per optimizer step: 24 pairs make three steps an epoch."""
KNOBS: dict[str, Any] = {"beta": 0.3, "label_smoothing": 0.1, "loss_type": {"sigmoid": 1.0, "sft": 0.5}}


class PlainDPO(PlainSGD, DPOModule):
    """DPO with SGD."""


class Steps(L.Callback):
    """Loss of each micro-batch and margin of each step; what is logged in the end; weights then, from any strategy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.margins: list[float] = []
        self.metrics: dict[str, float] = {}
        self.weights: dict[str, Any] = {}
        self.reference: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.made = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        if self.made < trainer.global_step:
            self.made = trainer.global_step
            self.margins.append(float(trainer.callback_metrics["rewards/margins"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if hasattr(trainer.strategy, "consolidated_state_dict"):
            self.weights = trainer.strategy.consolidated_state_dict("policy")
            if hasattr(module, "reference"):
                self.reference = trainer.strategy.consolidated_state_dict("reference")
        else:
            self.weights = {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}
            if hasattr(module, "reference"):
                self.reference = {name: tensor.clone() for name, tensor in module.reference.state_dict().items()}


def prepare(folder: Path) -> None:
    """A policy, another model as its reference, and 24 pairs of uneven lengths."""
    tiny_model(folder / "model", seed=1)
    tiny_model(folder / "reference", seed=0)
    rows = [
        {"prompt": f"{i}+{i}=", "chosen": "x" * (i % 5) + str(2 * i), "rejected": "y" * (i % 3 + 1)} for i in range(24)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(folder: Path, size: int, **arguments: Any) -> PreferenceDataModule:
    return PreferenceDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "log_every_n_steps": 1} | arguments)


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


def by_hand(folder: Path, epochs: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the run, in float64 and plain Transformers, one text at a time."""
    from rlhfkit.data.packing import permutation

    tokenizer = tiny_tokenizer()
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    policy = load_causal_lm(str(folder / "model"), loading=ModelLoading(attention="eager"), dtype=torch.float64)
    reference = load_causal_lm(str(folder / "reference"), loading=ModelLoading(attention="eager"), dtype=torch.float64)

    def logprob(model: Any, row: dict[str, str], answer: str) -> tuple[torch.Tensor, int]:
        prompt, completion = tokenizer(row["prompt"])["input_ids"], tokenizer(row[answer])["input_ids"]
        ids = torch.tensor([[*prompt, *completion, tokenizer.eos_token_id]])
        every = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return every[len(prompt) - 1 :].sum(), len(completion) + 1

    losses = []
    for epoch in range(epochs):
        order = permutation(24, seed=0, number=epoch)
        for start in range(0, 24, STEP):
            policy.zero_grad()
            contrast, likelihood, tokens = torch.zeros(()).double(), torch.zeros(()).double(), 0
            for row in (rows[index] for index in order[start : start + STEP]):
                (chosen, length), (rejected, _) = logprob(policy, row, "chosen"), logprob(policy, row, "rejected")
                with torch.no_grad():
                    anchor = logprob(reference, row, "chosen")[0] - logprob(reference, row, "rejected")[0]
                right = torch.sigmoid(KNOBS["beta"] * (chosen - rejected - anchor))
                contrast = contrast - 0.9 * right.log() - 0.1 * (1 - right).log()
                likelihood, tokens = likelihood - chosen, tokens + length
            loss = contrast / STEP + 0.5 * likelihood / tokens
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter -= LR * parameter.grad
    return losses, policy.state_dict()


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
        report[name] = steps.losses
        if steps.weights:
            torch.save([steps.weights, steps.reference], folder / f"{name}.pt")
        if saving:
            rest = fit(Path(model), accumulate, **shared, resume=str(folder / "saved" / "epoch=0.ckpt"))
            report["stopped and resumed"] = rest.losses
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
