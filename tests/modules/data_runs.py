"""Small runs on data, and plain SGD beside them: what modules of texts, pairs, answers and scores share."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

from rlhfkit.data.packing import permutation
from rlhfkit.models import ModelLoading, load_causal_lm

EPOCHS = 2


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows as a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder_of(prepare: Callable[[Path], Any]) -> Any:
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


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    """On one CPU, for two epochs, without files and bars."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, "enable_checkpointing": False}
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "log_every_n_steps": 1} | arguments)


class Steps(L.Callback):
    """This rank's losses, what is logged after each step, and in the end the weights, from any strategy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        """Of micro-batches, which Lightning has divided by the number of those of a step."""
        self.totals: list[float] = []
        """Of optimizer steps."""
        self.logged: list[dict[str, float]] = []
        self.weights: dict[str, Tensor] = {}
        self.reference: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.made, self.open = trainer.global_step, 0.0

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


def exact(path: Path) -> Any:
    """A model in float64 and plain Transformers."""
    return load_causal_lm(str(path), loading=ModelLoading(attention="eager"), dtype=torch.float64)


def answer_logprobs(model: Any, example: Any) -> Tensor:
    """(n,) log-probs of an answer's tokens, of one text."""
    ids = torch.tensor([example.input_ids])
    every = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return every[torch.tensor(example.loss_mask[1:])]


def answer_logprob(model: Any, example: Any) -> Tensor:
    """Log-prob of an answer."""
    return answer_logprobs(model, example).sum()


def by_sgd(
    model: nn.Module, rows: Sequence[Any], loss_of: Callable[[list[Any]], Tensor], *, size: int, lr: float
) -> list[float]:
    """The losses of steps on so many rows, in the order in which loaders shuffle them; the model is trained."""
    losses = []
    for epoch in range(EPOCHS):
        order = permutation(len(rows), seed=0, number=epoch)
        for start in range(0, len(rows), size):
            loss = loss_of([rows[row] for row in order[start : start + size]])
            model.zero_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad  # type: ignore[operator]
    return losses
