"""What one rank runs for the checkpoint tests."""

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import SaveAt

import rlhfkit.strategies  # noqa: F401  (registers the names)
from rlhfkit.checkpoints import CheckpointError
from strategies import toys
from strategies.parity_cases import RANK, RANKS, Spy, difference, weight_difference


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
    kind = options.pop("kind", toys.Toy)
    settings = {"critic": True, "reference": True, "dropout": 0.2} | options
    module, spy = kind(model, **settings), Spy()
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
        saves = [SaveAt(place / "middle.ckpt", 2), SaveAt(place / "window.ckpt", 3), saver]
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
    report["damage"] = damaged(model, folder / "stage2-32-true")
    return report


def validate(strategy: str, model: str, path: Path) -> float:
    """Validation loss of a checkpoint on the batch that training would see next, without dropout."""
    module = toys.Toy(model, critic=True, reference=True)
    data = toys.ShareLoader(toys.global_batches(1), RANK, RANKS)
    trainer = toys.trainer(strategy, RANKS)
    return trainer.validate(module, data, ckpt_path=path, verbose=False)[0]["validation_loss"]


def damaged(model: str, place: Path) -> dict[str, Any]:
    """Resumes from a checkpoint of stage 2 with a flipped byte in what rank 1 has saved, and from a missing one."""
    file = place / "end.ckpt" / "policy" / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if RANK == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed, _ = run("rlhf_zero2", model, 2, [], place / "end.ckpt", batches=4)
    found: dict[str, Any] = {"losses": len(resumed.losses)}
    found["warnings"] = [str(one.message) for one in caught if "damaged" in str(one.message)]
    try:
        run("rlhf_zero2", model, 2, [], place / "typo.ckpt")
    except CheckpointError as error:
        found["missing"] = str(error)
    return found


def on_one_rank(folder: Path, model: str, place: str) -> float:
    """Validation loss of a checkpoint that two ranks have saved at stage 3."""
    return validate("rlhf_zero3", model, Path(place) / "stage3-32-true" / "end.ckpt")
