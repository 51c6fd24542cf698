"""A small SFT run of 50 optimizer steps."""

import json
from pathlib import Path
from typing import Any

import lightning as L
from tiny_models import tiny_model


def prepare(folder: Path) -> None:
    """A model and 24 examples of uneven lengths."""
    tiny_model(folder / "model", seed=1)
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i * 7 % 13 + 1) + str(2 * i)} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trainer(folder: Path, **arguments: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "max_steps": 50, "max_epochs": -1, "enable_checkpointing": False}
    # In double precision a difference of formula cannot hide behind rounding that 50 steps have amplified.
    return L.Trainer(**plain | quiet | {"default_root_dir": str(folder), "precision": "64-true"} | arguments)
