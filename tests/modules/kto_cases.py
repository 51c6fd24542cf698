"""A small KTO run, and the same written by hand."""

from pathlib import Path
from typing import Any

import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from rlhfkit import KTOModule, UnpairedPreferenceDataModule

from .data_runs import Steps, answer_logprob, by_sgd, exact, trainer, write

STEP, LR = 8, 2e-3
"""Answers per optimizer step: 24 answers make three steps an epoch."""
KNOBS = {"beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7}


class PlainKTO(PlainSGD, KTOModule):
    """KTO with SGD."""


class Points(Steps):
    """The reference point of each optimizer step, too."""

    def __init__(self) -> None:
        super().__init__()
        self.kl: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.kl.append(float(module.kl))


def made(folder: Path, **arguments: Any) -> PlainKTO:
    """The module; it starts away from its reference, so that the reference point counts."""
    own = {} if "parts" in arguments else {"ref_model": str(folder / "reference")}  # a part says which itself
    return PlainKTO(str(folder / "model"), lr=LR, **own, **KNOBS, **arguments)


def prepare(folder: Path) -> None:
    """A policy, another model as its reference, and 24 answers of uneven lengths, 15 of them desirable."""
    tiny_model(folder / "model", seed=1)
    tiny_model(folder / "reference", seed=0)
    rows = [
        {"prompt": f"{i % 20}+{i}=", "completion": "x" * (i % 5) + str(2 * i), "label": i % 8 < 5} for i in range(24)
    ]
    write(folder / "data.jsonl", rows)


def data(folder: Path, size: int, **arguments: Any) -> UnpairedPreferenceDataModule:
    return UnpairedPreferenceDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def fit(folder: Path, accumulate: int, *, knobs: dict[str, Any] | None = None, **arguments: Any) -> Points:
    """One run in steps of 8 answers, however they are split."""
    steps = Points()
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], **arguments)
    run.fit(made(folder, **(knobs or {})), data(folder, STEP // accumulate))
    return steps


def by_hand(folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Reference points, losses and weights of the run, in float64 and plain Transformers, one text at a time."""
    source = data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    policy, reference, points = exact(folder / "model"), exact(folder / "reference"), list[float]()

    def loss_of(rows: list[Any]) -> Tensor:
        with torch.no_grad():
            drifts = [
                answer_logprob(policy, row.mismatched) - answer_logprob(reference, row.mismatched) for row in rows
            ]
            anchors = [answer_logprob(reference, row.answer) for row in rows]
        points.append(max(0.0, float(sum(drifts)) / STEP))
        terms = []
        for row, anchor in zip(rows, anchors, strict=True):
            reward = KNOBS["beta"] * (answer_logprob(policy, row.answer) - anchor - points[-1])
            sign, weight = (1, "desirable_weight") if row.desirable else (-1, "undesirable_weight")
            terms.append(KNOBS[weight] * (1 - torch.sigmoid(sign * reward)))
        return torch.stack(terms).mean()

    losses = by_sgd(policy, source.examples, loss_of, size=STEP, lr=LR)
    return points, losses, policy.state_dict()
