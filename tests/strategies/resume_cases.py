"""What one rank runs for the checkpoint tests."""

from pathlib import Path
from typing import Any

import toys
from lightning.pytorch.callbacks import ModelCheckpoint
from parity_cases import RANK, RANKS, Spy, difference, weight_difference

import rlhfkit.strategies  # noqa: F401  (registers the names)


class SaveAt(toys.pl.Callback):
    """Saves once, after a number of batches, as users do from a callback of their own."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 == self.batch and trainer.current_epoch == 0 and not self.path.exists():
            trainer.save_checkpoint(self.path)


def run(
    strategy: Any, model: str, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any
) -> tuple[Any, Spy]:
    """Fit with dropout, two engines, a frozen reference, accumulation 2 and a schedule, so that all state matters."""
    fit = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} | options.pop("trainer", {})
    settings = {"critic": True, "reference": True, "dropout": 0.2} | options
    module, spy = toys.Toy(model, **settings), Spy()
    trainer = toys.trainer(strategy, RANKS, max_epochs=epochs, callbacks=[spy, *callbacks], **fit)
    toys.pl.seed_everything(11 + RANK, verbose=False)
    trainer.fit(module, toys.ShareLoader(toys.global_batches(6), RANK, RANKS), ckpt_path=resume)
    return module, spy


def resume(folder: Path, model: str, stages: list[int], precision: str = "32-true") -> dict[str, Any]:
    """Straight runs against stopped and resumed ones, at the end and in the middle of an epoch."""
    report = {}
    options = {"trainer": {"precision": precision}}
    for stage in stages:
        name, place = f"rlhf_zero{stage}", folder / f"stage{stage}"
        straight, kept = run(name, model, 2, [SaveAt(4, place / "middle.ckpt")], **options)
        saver = ModelCheckpoint(dirpath=place, filename="end", save_on_train_epoch_end=True)
        run(name, model, 1, [saver], **options | {"trainer": options["trainer"] | {"enable_checkpointing": True}})
        for moment, done in (("end", 6), ("middle", 4)):
            resumed, spy = run(name, model, 2, [], place / f"{moment}.ckpt", **options)
            report[f"stage {stage}, {moment}"] = {
                "loss": difference(resumed.losses, straight.losses[done:]),
                "rates_equal": resumed.learning_rates == straight.learning_rates[done:],
                "weight": weight_difference(spy.weights, kept.weights) if RANK == 0 else 0.0,
                "files": sorted(p.name for p in (place / f"{moment}.ckpt").iterdir()),
                "best": saver.best_model_path,
            }
    return report
