"""Small runs of every module that learns from data, and plain SGD beside them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from plain_sgd import PlainSGD
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import (
    BCOModule,
    DFTModule,
    DistillationModule,
    DPOModule,
    KTOModule,
    PreferenceDataModule,
    ProcessRewardModule,
    RewardModule,
    SFTDataModule,
    SFTModule,
    StepwiseDataModule,
    UnpairedPreferenceDataModule,
)
from rlhfkit.modules.parts.answer_reference import PrecomputedReference

ROWS, STEP, EPOCHS = 16, 8, 2
"""Of each kind of data, and of an optimizer step: two steps an epoch."""
SOURCES: dict[str, Any] = {
    "texts": SFTDataModule,
    "pairs": PreferenceDataModule,
    "unpaired": UnpairedPreferenceDataModule,
    "steps": StepwiseDataModule,
}
DATA = {
    **dict.fromkeys((SFTModule, DFTModule, DistillationModule), "texts"),
    **dict.fromkeys((KTOModule, BCOModule), "unpaired"),
    ProcessRewardModule: "steps",
}
"""What a module learns from; others: pairs."""
ARGUMENTS: dict[type, dict[str, Any]] = {
    DPOModule: {"ref_model": "@reference", "beta": 0.3, "label_smoothing": 0.1}
    | {"loss_type": {"sigmoid": 1.0, "sft": 0.5}},
    KTOModule: {"ref_model": "@reference", "beta": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.7},
    DistillationModule: {"lr": 0.5, "teacher": "@teacher", "chunk_size": 7},
    RewardModule: {"lr": 0.01, "head_std": 0.3, "center_rewards_coefficient": 0.05, "label_smoothing": 0.1},
    ProcessRewardModule: {"lr": 0.01, "head_std": 0.3},
}
"""Every term of a loss switched on; ``@name``: in the folder."""


def row(data: str, i: int) -> dict[str, Any]:
    """One of a kind of data; rows are of uneven lengths."""
    asked, said, other = f"{i}+{i % 3}=", "x" * (i % 4) + str(i), "y" * (i % 3 + 1)
    return {
        "texts": {"prompt": asked, "completion": said},
        "pairs": {"prompt": asked, "chosen": said, "rejected": other},
        "unpaired": {"prompt": asked, "completion": said, "label": i % 3 > 0},
        "steps": {"prompt": asked, "completions": [said, other], "labels": [i % 2, 1]},
        "prompts": {"prompt": asked},
    }[data]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(folder: Path) -> None:
    """A model, another one as its reference, a teacher with an output layer of its own, and rows of each kind.

    Pairs have margins, and one step of three has a soft label.
    """
    tiny_model(folder / "model", seed=1)
    tiny_model(folder / "reference", seed=5)  # which the policy is away from: KTO's reference point is above 0
    tiny_model(folder / "teacher", seed=2, tied=False)
    more = {"pairs": lambda i: {"margin": i % 3 / 2}, "steps": lambda i: {"labels": [i % 2, (1, 0, 0.3)[i % 3]]}}
    for name in SOURCES:
        write(folder / f"{name}.jsonl", [row(name, i) | more.get(name, lambda i: {})(i) for i in range(ROWS)])


def folder_of(prepare: Callable[[Path], Any] = prepare) -> Any:
    """A fixture of a file's tests: a folder, prepared once."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        place = tmp_path_factory.mktemp("prepared")
        prepare(place)
        return place

    return folder


def texts(folder: Path) -> None:
    """A model and 24 examples of uneven lengths."""
    tiny_model(folder / "model", seed=1)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i * 7 % 13 + 1) + str(2 * i)} for i in range(24)]
    write(folder / "data.jsonl", rows)


def data(folder: Path, kind: type, size: int = STEP, *, validated: bool = False, **arguments: Any) -> Any:
    """The data of a module, also as validation data."""
    name = DATA.get(kind, "pairs")
    file = str(folder / f"{name}.jsonl")
    held_out = {"validation_data": file, "validation_split": "train"} if validated else {}
    return SOURCES[name](file, micro_batch_size=size, max_length=64, **held_out | arguments)


def plain_module(folder: Path, kind: type, **arguments: Any) -> Any:
    """A module with SGD."""
    given = {"model": "@model", "lr": 2e-3} | ARGUMENTS.get(kind, {}) | arguments
    paths = {name: str(folder / v[1:]) if str(v).startswith("@") else v for name, v in given.items()}
    return type(f"Plain{kind.__name__}", (PlainSGD, kind), {})(**paths)


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    """On one CPU, for two epochs, without files and bars."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "log_every_n_steps": 1} | arguments)


def computed(cache: Path | str) -> dict[str, Any]:
    """Arguments of a module whose initial policy's log-probs are computed before training."""
    return {"ref_model": None, "parts": [PrecomputedReference(cache=str(cache)).plain()]}


class Steps(L.Callback):
    """This rank's losses, what is logged after each step, and in the end the weights, from any strategy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        """Of micro-batches, which Lightning has divided by the number of those of a step."""
        self.totals: list[float] = []
        """Of optimizer steps."""
        self.logged: list[dict[str, float]] = []
        self.module: Any = None
        self.weights: dict[str, Tensor] = {}
        self.reference: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.made, self.open, self.module = trainer.global_step, 0.0, pl_module

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.open += self.losses[-1]
        if self.made < trainer.global_step:
            self.made = trainer.global_step
            self.totals.append(self.open)
            self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
            self.open = 0.0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for child, found in (("policy", "weights"), ("reference", "reference")):
            if hasattr(trainer.strategy, "consolidated_state_dict") and hasattr(pl_module, child):
                setattr(self, found, trainer.strategy.consolidated_state_dict(child))
            elif hasattr(pl_module, child):
                state = getattr(pl_module, child).state_dict()
                setattr(self, found, {name: tensor.clone() for name, tensor in state.items()})


def fit(
    folder: Path,
    kind: type,
    accumulate: int = 1,
    *,
    ranks: int = 1,
    callbacks: Sequence[L.Callback] = (),
    resume: str | None = None,
    knobs: dict[str, Any] | None = None,
    **arguments: Any,
) -> Steps:
    """One run in steps of eight rows, however they are split; ``knobs``: more arguments of the module."""
    steps = Steps()
    run = trainer(folder, accumulate_grad_batches=accumulate, callbacks=[steps, *callbacks], devices=ranks, **arguments)
    size = STEP // accumulate // ranks
    run.fit(plain_module(folder, kind, **(knobs or {})), data(folder, kind, size), ckpt_path=resume)
    return steps


def answer_logprobs(model: Any, example: Any) -> Tensor:
    """(n,) log-probs of an answer's tokens, of one text."""
    ids = torch.tensor([example.input_ids])
    every = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return every[torch.tensor(example.loss_mask[1:])]
