"""What one rank runs for the tests of runs that are killed and resumed: all steps of a run, or as many as it lives."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import setup_run
from tiny_models import tiny_model

from rlhfkit import RLHFDeepSpeedStrategy, SFTDataModule, SFTModule
from rlhfkit.rollout import ModuleWeights

# Read once: Lightning deletes WORLD_SIZE from the environment when a fit ends.
RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Trace(L.Callback):
    """Writes down which micro-batch every optimizer step learns from, as it happens, and the weights at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: list[int] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._write([trainer.global_step])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._write([trainer.global_step + 1, zlib.crc32(batch.input_ids.numpy().tobytes())])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [zlib.crc32(tensor.numpy().tobytes()) for _, tensor in ModuleWeights(pl_module.policy)]

    def _write(self, entry: list[int]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def run(
    folder: Path, kind: str, strategy: str, place: str, saved: str | None, resume: str | None, epochs: int
) -> list[int]:
    """One life of a run: until it is done, or killed.

    Args:
        folder: Of this launch: the trace.
        kind: ``rl`` or ``sft``.
        strategy: Name of the strategy; ``background rlhf_zero2`` saves in the background.
        place: Of the run: model and data.
        saved: Where to save after every optimizer step.
        resume: Checkpoint to go on from.
        epochs: Of the whole run, two steps each.

    Returns:
        A checksum of each weight at the end.
    """
    os.environ["WORLD_SIZE"] = str(RANKS)
    trace = Trace(folder / f"trace_{RANK}.jsonl")
    saver = [] if saved is None else [ModelCheckpoint(saved, filename="{step}", every_n_train_steps=1)]
    stage = strategy.removeprefix("background rlhf_zero")
    options: dict[str, Any] = {
        "strategy": strategy if stage == strategy else RLHFDeepSpeedStrategy(int(stage), async_save=True),
        "devices": RANKS,
        "use_distributed_sampler": False,
        "max_epochs": epochs,
        "enable_checkpointing": saved is not None,
        "accumulate_grad_batches": 2,
    }
    callbacks = [trace, *saver]
    home = Path(place) / f"rank{RANK}"  # ranks must not write the same model
    if kind == "rl":
        micro = {"micro_batch_size": 8 // RANKS}
        trainer, module, data, _ = setup_run(home, callbacks=callbacks, data_arguments=micro, **options)
        trainer.fit(module, data, ckpt_path=resume)
    else:
        home.mkdir(parents=True, exist_ok=True)
        (home / "rows.jsonl").write_text("".join(json.dumps({"text": f"{i}+{i}={2 * i}"}) + "\n" for i in range(32)))
        model = home / "model"
        if not model.exists():
            tiny_model(model)
        text = SFTDataModule(str(home / "rows.jsonl"), tokenizer=str(model), micro_batch_size=8 // RANKS)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = L.Trainer(callbacks=callbacks, default_root_dir=str(home), **options, **quiet)
        trainer.fit(SFTModule(str(model), lr=1e-3), text, ckpt_path=resume)
    return trace.weights
