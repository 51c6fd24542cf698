"""A small distillation run, for this process and for ranks of their own, and the same written by hand."""

import os
from pathlib import Path
from typing import Any

import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from rlhfkit import DistillationModule, SFTDataModule

from .data_runs import Steps, by_sgd, exact, trainer, write

RANKS = int(os.environ.get("WORLD_SIZE", 1))
STEP, LR = 8, 0.5


class PlainDistillation(PlainSGD, DistillationModule):
    """Distillation with SGD."""


def prepare(folder: Path) -> None:
    """A student, a teacher with an output layer of its own, and 24 answers of uneven lengths."""
    tiny_model(folder / "model")
    tiny_model(folder / "teacher", seed=1, tied=False)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i % 5) + str(2 * i)} for i in range(24)]
    write(folder / "data.jsonl", rows)


def data(folder: Path, size: int, **arguments: Any) -> SFTDataModule:
    return SFTDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def fit(folder: Path, accumulate: int, knobs: dict[str, Any], *, ranks: int = 1, **arguments: Any) -> Steps:
    """One run in steps of 8 examples, however they are split; seven tokens at a time."""
    steps = Steps()
    module = PlainDistillation(str(folder / "model"), str(folder / "teacher"), lr=LR, chunk_size=7, **knobs)
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], devices=ranks, **arguments)
    run.fit(module, data(folder, STEP // accumulate // ranks))
    return steps


def by_hand(folder: Path, token_loss: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights in float64 and plain Transformers, one text at a time.

    ``token_loss(student, teacher, targets)``: (n, V) log-probs each and (n,) token ids, to (n,).
    """
    source = data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    student, teacher = exact(folder / "model"), exact(folder / "teacher")

    def loss_of(rows: list[Any]) -> Tensor:
        terms = []
        for row in rows:
            ids, mask = torch.tensor([row.input_ids]), torch.tensor(row.loss_mask[1:])
            with torch.no_grad():
                wanted = teacher(input_ids=ids).logits[0, :-1][mask].log_softmax(-1)
            given = student(input_ids=ids).logits[0, :-1][mask].log_softmax(-1)
            terms.append(token_loss(given, wanted, ids[0, 1:][mask]))
        return torch.cat(terms).mean()

    return by_sgd(student, source.examples, loss_of, size=STEP, lr=LR), student.state_dict()


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
