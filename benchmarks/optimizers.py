"""AdamW and Muon on the supervised part of the demo: validation loss by optimizer step, three seeds; one JSON line.

    python benchmarks/optimizers.py --steps 300

The model of ``make demo`` (two layers of width 128) learns two-number additions from ``tutorials/arithmetic.py``, in
steps of 64 demonstrations, with ``lr=2e-3``, the demo's own, and a warm-up of 50 steps. Both optimizers have the same
rates, data, order and initial weights; only ``SFTModule(optimizer=...)`` differs. ``val/loss`` is in nats per token.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tutorials"))

import arithmetic

from rlhfkit import SFTDataModule, SFTModule


class Losses(L.Callback):
    """The validation loss of each check."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the loss under the number of optimizer steps so far."""
        self.by_step[trainer.global_step] = float(trainer.callback_metrics["val/loss"])


def losses(optimizer: str, seed: int, steps: int, every: int) -> dict[int, float]:
    """Validation losses of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = arithmetic.make(Path(name), seed)
        L.seed_everything(seed, verbose=False)
        module = SFTModule(str(folder / "model"), lr=2e-3, warmup_steps=50, optimizer=optimizer)
        data = SFTDataModule(
            str(folder / "demonstrations.jsonl"),
            validation_data=str(folder / "validation.jsonl"),
            validation_split="train",
            prompt="question",
            completion="answer",
            micro_batch_size=64,
            max_length=64,
            cache_dir=name,
        )
        watch = Losses()
        L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            max_epochs=-1,
            val_check_interval=every,
            check_val_every_n_epoch=None,
            gradient_clip_val=1.0,
            callbacks=[watch],
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=name,
        ).fit(module, data)
    return watch.by_step


def main() -> None:
    """Run both optimizers with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"benchmark": "optimizers", "steps": options.steps}
    for optimizer in ("adamw", "muon"):
        runs = [losses(optimizer, seed, options.steps, options.every) for seed in range(options.seeds)]
        result[optimizer] = {
            step: {"mean": round(statistics.mean(values), 4), "each": [round(value, 4) for value in values]}
            for step in runs[0]
            for values in [[run[step] for run in runs]]
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
