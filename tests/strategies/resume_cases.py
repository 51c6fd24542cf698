"""What one rank runs for the checkpoint tests."""

import json
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

import rlhfkit.strategies  # noqa: F401  (registers the names)
from rlhfkit.checkpoints import CheckpointError
from rlhfkit.strategies.checkpoint import verification
from strategies import toys
from strategies.parity_cases import RANK, RANKS, Spy, difference, weight_difference


class SaveAt(toys.pl.Callback):
    """Saves once, after a number of batches, as users do from a callback of their own."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index + 1 == self.batch and trainer.current_epoch == 0 and not self.path.exists():
            trainer.save_checkpoint(self.path)


class SaveFirstEnd(ModelCheckpoint):
    """Saves ``end.ckpt`` after the first epoch only."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            super().on_train_epoch_end(trainer, module)


def run(
    strategy: Any, model: str, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any
) -> tuple[Any, Spy]:
    """Fit with dropout, two engines, a frozen reference, accumulation 2 and a schedule, so that all state matters."""
    batches = options.pop("batches", 6)
    fit = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0} | options.pop("trainer", {})
    settings = {"critic": True, "reference": True, "dropout": 0.2} | options
    module, spy = toys.Toy(model, **settings), Spy()
    trainer = toys.trainer(strategy, RANKS, max_epochs=epochs, callbacks=[spy, *callbacks], **fit)
    toys.pl.seed_everything(11 + RANK, verbose=False)
    trainer.fit(module, toys.ShareLoader(toys.global_batches(batches), RANK, RANKS), ckpt_path=resume)
    return module, spy


def resume(folder: Path, model: str, stages: list[int], precisions: list[str]) -> dict[str, Any]:
    """Straight runs against stopped and resumed ones, at the end and in the middle of an epoch."""
    report = {}
    for stage, precision in ((s, p) for s in stages for p in precisions if p == "32-true" or s < 2):
        options: dict[str, Any] = {"trainer": {"precision": precision}, "batches": 4}
        name, place = f"rlhf_zero{stage}", folder / f"stage{stage}-{precision}"
        saver = SaveFirstEnd(dirpath=place, filename="end", save_on_train_epoch_end=True)
        saves = [SaveAt(2, place / "middle.ckpt"), SaveAt(3, place / "window.ckpt"), saver]
        saving = options | {"trainer": options["trainer"] | {"enable_checkpointing": True}}
        straight, kept = run(name, model, 2, saves, **saving)
        moments = {"end": 4, "middle": 2} | ({"window": 2} if stage >= 2 else {})
        for moment, done in moments.items():
            resumed, spy = run(name, model, 2, [], place / f"{moment}.ckpt", **options)
            report[f"stage {stage}, {precision}, {moment}"] = {
                "loss": difference(resumed.losses, straight.losses[done:]),
                "rates_equal": resumed.learning_rates == straight.learning_rates[done:],
                "weight": weight_difference(spy.weights, kept.weights) if RANK == 0 else 0.0,
                "files": sorted(p.name for p in (place / f"{moment}.ckpt").iterdir()),
                "best": saver.best_model_path,
            }
        if precision == "32-true":
            report[f"stage {stage}, evaluation"] = {"validation": validate(name, model, place / "end.ckpt")}
    return report


def validate(strategy: str, model: str, path: Path) -> float:
    """Validation loss of a checkpoint on the batch that training would see next, without dropout."""
    module = toys.Toy(model, critic=True, reference=True)
    data = toys.ShareLoader(toys.global_batches(1), RANK, RANKS)
    trainer = toys.trainer(strategy, RANKS)
    return trainer.validate(module, data, ckpt_path=path, verbose=False)[0]["validation_loss"]


def damage(folder: Path, model: str, place: str) -> dict[str, Any]:
    """What happens to bad input: a flipped byte, no checkpoint at all."""
    source = Path(place)
    if RANKS == 1:
        return {"validation": validate("rlhf_zero3", model, source / "stage3-32-true" / "end.ckpt")}
    report: dict[str, Any] = {}
    two = source / "stage2-32-true"
    report["typo"] = problem("rlhf_zero2", model, two / "typo.ckpt")
    report["file"] = problem("rlhf_zero2", model, Path(model) / "config.json")
    file = two / "end.ckpt" / "policy" / "checkpoint" / "mp_rank_00_model_states.pt"
    if RANK == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, _ = run("rlhf_zero2", model, 2, [], two / "end.ckpt", batches=4)
    report["losses"] = len(resumed.losses)
    report["warnings"] = [str(w.message) for w in caught if "damaged" in str(w.message)]
    return report


def problem(strategy: str, model: str, path: Path) -> str:
    """The error of a resume that cannot work."""
    try:
        run(strategy, model, 2, [], path)
    except CheckpointError as error:
        return str(error)
    return "no error"


class SaveAlways(toys.pl.Callback):
    """Overwrites one checkpoint after every step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.save_checkpoint(self.path)


def save_for_ever(folder: Path, model: str, place: str) -> None:
    """Train and save until killed."""
    run("rlhf_zero2", model, 10_000, [SaveAlways(Path(place) / "last.ckpt")], trainer={"accumulate_grad_batches": 1})


def continue_run(folder: Path, model: str, place: str) -> list[int]:
    """Load what a killed run has left, train one more epoch, keep one checkpoint."""
    path, kept = Path(place) / "last.ckpt", Path(place) / "kept"
    step = json.loads((verification.find_intact(path)[0] / "manifest.json").read_text())["global_step"]
    saver = ModelCheckpoint(dirpath=kept, every_n_train_steps=2, save_top_k=1, monitor=None)
    settings = {"accumulate_grad_batches": 1, "enable_checkpointing": True}
    run("rlhf_zero2", model, step // 6 + 2, [saver], path, trainer=settings)
    return [step, len(list(kept.iterdir()))]
