"""A small distillation run, for this process and for ranks of their own, and the same written by hand."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model

from rlhfkit import DistillationModule, SFTDataModule
from rlhfkit.data.packing import permutation
from rlhfkit.models import ModelLoading, load_causal_lm

RANKS = int(os.environ.get("WORLD_SIZE", 1))
STEP, EPOCHS, LR = 8, 2, 0.5


class PlainDistillation(PlainSGD, DistillationModule):
    """Distillation with SGD."""


def prepare(folder: Path) -> None:
    """A student, a teacher with an output layer of its own, and 24 answers of uneven lengths."""
    tiny_model(folder / "model")
    tiny_model(folder / "teacher", seed=1, tied=False)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i % 5) + str(2 * i)} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(folder: Path, size: int, **arguments: Any) -> SFTDataModule:
    return SFTDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder)} | arguments)


class Steps(L.Callback):
    """The loss of each micro-batch as a share of its step's; weights at the end, from any strategy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if hasattr(trainer.strategy, "consolidated_state_dict"):
            self.weights = trainer.strategy.consolidated_state_dict("policy")
        else:
            self.weights = {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


def fit(folder: Path, accumulate: int, knobs: dict[str, Any], *, ranks: int = 1, **arguments: Any) -> Steps:
    """One run in steps of 8 examples, however they are split; seven tokens at a time."""
    steps = Steps()
    module = PlainDistillation(str(folder / "model"), str(folder / "teacher"), lr=LR, chunk_size=7, **knobs)
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], devices=ranks, **arguments)
    run.fit(module, data(folder, STEP // accumulate // ranks))
    return steps


def by_hand(folder: Path, token_loss: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights in float64 and plain Transformers, one text at a time.

    ``token_loss(student, teacher, targets)``: (n, V) log-probs each and (n,) token ids, to (n,).
    """
    from tiny_models import tiny_tokenizer

    source = data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    examples = source.examples
    student = load_causal_lm(str(folder / "model"), loading=ModelLoading(attention="eager"), dtype=torch.float64)
    teacher = load_causal_lm(str(folder / "teacher"), loading=ModelLoading(attention="eager"), dtype=torch.float64)
    losses = []
    for epoch in range(EPOCHS):
        order = permutation(24, seed=0, number=epoch)
        for start in range(0, 24, STEP):
            student.zero_grad()
            total, count = torch.zeros((), dtype=torch.float64), 0
            for row in order[start : start + STEP]:
                ids, mask = torch.tensor([examples[row].input_ids]), torch.tensor(examples[row].loss_mask[1:])
                with torch.no_grad():
                    wanted = teacher(input_ids=ids).logits[0, :-1][mask].log_softmax(-1)
                given = student(input_ids=ids).logits[0, :-1][mask].log_softmax(-1)
                total = total + token_loss(given, wanted, ids[0, 1:][mask]).sum()
                count += int(mask.sum())
            (total / count).backward()
            losses.append(float(total.detach() / count))
            with torch.no_grad():
                for parameter in student.parameters():
                    parameter -= LR * parameter.grad
    return losses, student.state_dict()


def computed(cache: Path) -> dict[str, Any]:
    """Arguments of a module whose teacher's likeliest tokens are computed before training, and kept in a folder."""
    name = "rlhfkit.modules.parts.precomputed_teacher.PrecomputedTeacher"
    return {"parts": [{"class_path": name, "init_args": {"cache": str(cache)}}]}


def on_ranks(folder: Path, data: str, knobs: dict[str, Any]) -> None:
    """What one rank runs: ZeRO 3, where the teacher is an inference engine; then with the teacher's tokens on disk."""
    steps = fit(Path(data), 2, knobs, ranks=RANKS, strategy="rlhf_zero3")
    cache = {"top_k": 5, **computed(folder / "cache")}
    kept = fit(Path(data), 2, knobs | cache, ranks=RANKS, strategy="rlhf_zero2")
    if steps.weights:
        torch.save([steps.weights, kept.weights], folder / "weights.pt")
