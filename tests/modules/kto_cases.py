"""A small KTO run, and the same written by hand."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import KTOModule, UnpairedPreferenceDataModule
from rlhfkit.models import ModelLoading, load_causal_lm

STEP, EPOCHS, LR = 8, 2, 2e-3
"""Answers per optimizer step: 24 answers make three steps an epoch."""
KNOBS = {"beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7}


def made(folder: Path, **arguments: Any) -> "PlainKTO":
    """The module; it starts away from its reference, so that the reference point counts."""
    own = {} if "parts" in arguments else {"ref_model": str(folder / "reference")}  # a part says which itself
    return PlainKTO(str(folder / "model"), lr=LR, **own, **KNOBS, **arguments)


class PlainKTO(PlainSGD, KTOModule):
    """KTO with SGD."""


class Steps(L.Callback):
    """Reference point, margin and summed loss of each optimizer step; weights at the end, from any strategy."""

    def __init__(self) -> None:
        self.kl: list[float] = []
        self.losses: list[float] = []
        self.margins: list[float] = []
        self.weights: dict[str, Any] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.kl.append(float(module.kl))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.margins.append(float(trainer.callback_metrics.get("rewards/margins", torch.nan)))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if hasattr(trainer.strategy, "consolidated_state_dict"):
            self.weights = trainer.strategy.consolidated_state_dict("policy")
        else:
            self.weights = {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


def prepare(folder: Path) -> None:
    """A policy, another model as its reference, and 24 answers of uneven lengths, 15 of them desirable."""
    tiny_model(folder / "model", seed=1)
    tiny_model(folder / "reference", seed=0)
    rows = [
        {"prompt": f"{i % 20}+{i}=", "completion": "x" * (i % 5) + str(2 * i), "label": i % 8 < 5} for i in range(24)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def data(folder: Path, size: int, **arguments: Any) -> UnpairedPreferenceDataModule:
    return UnpairedPreferenceDataModule(str(folder / "data.jsonl"), micro_batch_size=size, max_length=64, **arguments)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "log_every_n_steps": 1} | arguments)


def fit(folder: Path, accumulate: int, *, knobs: dict[str, Any] | None = None, **arguments: Any) -> Steps:
    """One run in steps of 8 answers, however they are split."""
    steps = Steps()
    module = made(folder, **(knobs or {}))
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps], **arguments)
    run.fit(module, data(folder, STEP // accumulate))
    return steps


def by_hand(folder: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Reference points, losses and weights of the run, in float64 and plain Transformers, one text at a time."""
    source = data(folder, STEP, tokenizer=tiny_tokenizer())
    source.setup()
    examples = source.examples
    policy = load_causal_lm(str(folder / "model"), loading=ModelLoading(attention="eager"), dtype=torch.float64)
    reference = load_causal_lm(str(folder / "reference"), loading=ModelLoading(attention="eager"), dtype=torch.float64)

    def logprob(model: Any, example: Any) -> torch.Tensor:
        ids = torch.tensor([example.input_ids])
        every = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        return every[torch.tensor(example.loss_mask[1:])].sum()

    from rlhfkit.data.packing import permutation

    points, losses = [], []
    for epoch in range(EPOCHS):
        order = permutation(24, seed=0, number=epoch)
        for start in range(0, 24, STEP):
            rows = [examples[row] for row in order[start : start + STEP]]
            with torch.no_grad():
                drifts = [logprob(policy, row.mismatched) - logprob(reference, row.mismatched) for row in rows]
            point = max(0.0, float(sum(drifts)) / STEP)
            policy.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for row in rows:
                with torch.no_grad():
                    anchor = logprob(reference, row.answer)
                reward = KNOBS["beta"] * (logprob(policy, row.answer) - anchor - point)
                if row.desirable:
                    total = total + KNOBS["desirable_weight"] * (1 - torch.sigmoid(reward))
                else:
                    total = total + KNOBS["undesirable_weight"] * (1 - torch.sigmoid(-reward))
            (total / STEP).backward()
            points.append(point)
            losses.append(float(total.detach() / STEP))
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter -= LR * parameter.grad
    return points, losses, policy.state_dict()
