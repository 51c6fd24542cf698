"""Small runs of reward models and process reward models, and the same written by hand in plain Transformers."""

import os
from pathlib import Path
from typing import Any

import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, logsigmoid
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhfkit import PreferenceDataModule, ProcessRewardModule, RewardModule, StepwiseDataModule

from .data_runs import Steps, by_sgd, trainer, write

RANKS = int(os.environ.get("WORLD_SIZE", 1))
ROWS, STEP, LR, HEAD_STD = 14, 4, 0.01, 0.3
"""Three full optimizer steps and a half one in each epoch."""
CENTERING, SMOOTHING = 0.05, 0.1
KINDS = ("reward", "process")


class Reward(PlainSGD, RewardModule):
    """Every term of the loss switched on."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        super().__init__(model, **{"center_rewards_coefficient": CENTERING, "label_smoothing": SMOOTHING} | kwargs)


class Process(PlainSGD, ProcessRewardModule):
    """Hard and soft labels come from the data."""


def prepare(folder: Path) -> None:
    """A model, preference pairs with margins, and answers in steps with hard and soft labels; lengths are uneven."""
    tiny_model(folder / "model")
    pairs = [
        {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "x" * (i % 5 + 1), "margin": (i % 3) / 2}
        for i in range(ROWS)
    ]
    stepwise = [
        {
            "prompt": f"{i}?",
            "completions": ["a" * (i % 4), str(i), "so"][: i % 3 + 1],
            "labels": [1.0, 0.0, 0.3][: i % 3 + 1],
        }
        for i in range(ROWS)
    ]
    for name, rows in zip(KINDS, (pairs, stepwise), strict=True):
        write(folder / f"{name}.jsonl", rows)


def data(folder: Path, kind: str, size: int, **arguments: Any) -> Any:
    made = PreferenceDataModule if kind == "reward" else StepwiseDataModule
    return made(str(folder / f"{kind}.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def module(folder: Path, kind: str, **arguments: Any) -> Any:
    made = Reward if kind == "reward" else Process
    return made(str(folder / "model"), **{"lr": LR, "head_std": HEAD_STD} | arguments)


def fit(folder: Path, kind: str, accumulate: int, *, ranks: int = 1, **arguments: Any) -> tuple[list[float], Any]:
    """One run in steps of four examples, however they are split: losses and the trained module."""
    steps, made = Steps(), module(folder, kind)
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], devices=ranks, **arguments)
    run.fit(made, data(folder, kind, STEP // accumulate // ranks))
    return steps.totals, made


def by_hand(folder: Path, kind: str, start: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the run in float64, one text at a time, from the model saved in ``start``."""
    source = data(folder, kind, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForTokenClassification
    model = auto.from_pretrained(start, dtype=torch.float64, attn_implementation="eager").eval()

    def loss_of(rows: list[Any]) -> Tensor:
        return torch.stack([term for row in rows for term in _terms(model, kind, row)]).mean()

    return by_sgd(model, source.examples, loss_of, size=STEP, lr=LR), model.state_dict()


def _terms(model: Any, kind: str, example: Any) -> list[Tensor]:
    """What is averaged: the loss of a pair, or of each step."""

    def logits(ids: list[int]) -> Tensor:
        return model(input_ids=torch.tensor([ids])).logits[0]

    if kind == "reward":
        chosen, rejected = (logits(answer.input_ids)[0] for answer in (example.chosen, example.rejected))
        gap = chosen - rejected - example.margin
        likelihood = (1 - SMOOTHING) * logsigmoid(gap) + SMOOTHING * logsigmoid(-gap)
        return [CENTERING * (chosen + rejected) ** 2 - likelihood]
    good = logits(example.answer.input_ids).softmax(-1)[:, 1]
    ends = [position for position, end in enumerate(example.answer.loss_mask) if end]
    labels = torch.tensor(example.labels, dtype=torch.float64)
    return list(binary_cross_entropy(good[ends], labels, reduction="none"))


def on_ranks(folder: Path, model: str) -> dict[str, Any]:
    """What one rank runs: both kinds at ZeRO 3, which are saved, and a validation, in one process group."""
    for kind, accumulate in (("reward", 1), ("process", 2)):
        _, made = fit(Path(model), kind, accumulate, ranks=RANKS, strategy="rlhf_zero3", num_nodes=1)
        made.save_pretrained(Path(model) / f"{kind} of two ranks")
    made = module(Path(model), "reward")
    source = data(Path(model), "reward", 3, validation_data=f"{model}/reward.jsonl")
    run = trainer(Path(model), devices=RANKS, strategy="ddp", num_nodes=1)
    return run.validate(made, source, verbose=False)[0] | {"constants": made.constants}
