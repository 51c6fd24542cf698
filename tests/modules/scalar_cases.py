"""Small runs of reward models and process reward models, and the same written by hand in plain Transformers."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer
from torch.nn.functional import binary_cross_entropy, logsigmoid
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhfkit import PreferenceDataModule, ProcessRewardModule, RewardModule, StepwiseDataModule
from rlhfkit.data.packing import permutation

RANKS = int(os.environ.get("WORLD_SIZE", 1))
ROWS, STEP, EPOCHS, LR, HEAD_STD = 14, 4, 2, 0.01, 0.3
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
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(folder: Path, kind: str, size: int, **arguments: Any) -> Any:
    made = PreferenceDataModule if kind == "reward" else StepwiseDataModule
    return made(str(folder / f"{kind}.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def module(folder: Path, kind: str, **arguments: Any) -> Any:
    made = Reward if kind == "reward" else Process
    return made(str(folder / "model"), **{"lr": LR, "head_std": HEAD_STD} | arguments)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "log_every_n_steps": 1} | arguments)


class Steps(L.Callback):
    """Loss of each optimizer step, this rank's share."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.open = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.open += float(outputs["loss"])
        if trainer.global_step > len(self.losses):
            self.losses.append(self.open)
            self.open = 0.0


def fit(folder: Path, kind: str, accumulate: int, *, ranks: int = 1, **arguments: Any) -> tuple[list[float], Any]:
    """One run in steps of four examples, however they are split: losses and the trained module."""
    steps, made = Steps(), module(folder, kind)
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], devices=ranks, **arguments)
    run.fit(made, data(folder, kind, STEP // accumulate // ranks))
    return steps.losses, made


def by_hand(folder: Path, kind: str, start: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the run in float64, one text at a time, from the model saved in ``start``."""
    source = data(folder, kind, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    auto = AutoModelForSequenceClassification if kind == "reward" else AutoModelForTokenClassification
    model = auto.from_pretrained(start, dtype=torch.float64, attn_implementation="eager").eval()
    losses = []
    for epoch in range(EPOCHS):
        order = permutation(ROWS, seed=0, number=epoch)
        for first in range(0, ROWS, STEP):
            examples = [source.examples[row] for row in order[first : first + STEP]]
            each = [term for example in examples for term in _terms(model, kind, example)]
            loss = torch.stack(each).mean()
            model.zero_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
    return losses, model.state_dict()


def _terms(model: Any, kind: str, example: Any) -> list[torch.Tensor]:
    """What is averaged: the loss of a pair, or of each step."""

    def logits(ids: list[int]) -> torch.Tensor:
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
