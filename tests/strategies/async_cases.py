"""What one rank runs for the tests of checkpoints that are written in the background."""

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.checkpoint import directory, verification
from strategies import toys
from strategies.parity_cases import RANK, difference, weight_difference
from strategies.resume_cases import run


@contextmanager
def held() -> Iterator[threading.Event]:
    """Saves in the background wait with their first file until the event is set; it is set at the end."""
    gate, create = threading.Event(), directory.create_temporary

    def create_later(path: Path) -> Path:
        assert not threading.current_thread().name.startswith("save ") or gate.wait(600)
        return create(path)

    directory.create_temporary = create_later  # type: ignore[assignment]
    try:
        yield gate
    finally:
        gate.set()
        directory.create_temporary = create


class SaveBothWays(toys.pl.Callback):
    """After the fourth batch: blocking, then in the background, which is held until two batches later."""

    def __init__(self, place: Path, gate: threading.Event) -> None:
        self.place, self.gate, self.seen = place, gate, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch == 0 and index == 3:
            trainer.strategy.async_save = False
            trainer.save_checkpoint(self.place / "blocking.ckpt")
            trainer.strategy.async_save = True
            trainer.save_checkpoint(self.place / "background.ckpt")
        if trainer.current_epoch == 0 and index == 5:
            self.seen.append((self.place / "background.ckpt").exists())
            self.gate.set()


def bitwise(folder: Path, model: str, stage: int) -> dict[str, Any]:
    """A run that saves while it trains on, and its resume."""
    strategy, place = RLHFDeepSpeedStrategy(stage, async_save=True), folder / f"stage{stage}"
    with held() as gate:
        saver = SaveBothWays(place, gate)
        straight, kept = run(strategy, model, 1, [saver])
    files = {name for name in os.listdir(place) if not name.endswith(".tmp")}
    both = [place / "blocking.ckpt", place / "background.ckpt"]
    manifests = [verification.verify(path) for path in both]
    own = directory.files_of_rank(place / "background.ckpt", RANK)
    resumed, spy = run(RLHFDeepSpeedStrategy(stage, async_save=True), model, 1, [], place / "background.ckpt")
    return {
        "existed early": saver.seen,
        "files": sorted(files),
        "same names": manifests[0]["files"].keys() == manifests[1]["files"].keys(),
        "different": [
            name
            for name in own
            if name.endswith(".pt") and not same(*(torch.load(path / name, weights_only=False) for path in both))
        ],
        "snapshot": strategy.snapshot_bytes / sum(manifests[1]["files"][name] for name in own),
        "loss": difference(resumed.losses, straight.losses[4:]),
        "weight": weight_difference(spy.weights, kept.weights) if RANK == 0 else 0.0,
    }


def same(first: Any, second: Any) -> bool:
    """Whether two loaded files are equal, down to the attributes of DeepSpeed's objects."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second or (hasattr(first, "__dict__") and same(vars(first), vars(second)))


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """One rank can write small files only."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == RANK:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class SaveOnFullDisk(toys.pl.Callback):
    """The first save succeeds, the second fails on rank 1, the third raises that and is tried again."""

    def __init__(self, place: Path) -> None:
        self.place, self.errors = place, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            trainer.save_checkpoint(self.place / "first.ckpt")
            trainer.strategy.wait_for_saves()
        if index == 3:
            with full_disk(1):
                trainer.save_checkpoint(self.place / "second.ckpt")
                trainer.strategy._background_save._thread.join()
        if index == 5:
            try:
                trainer.save_checkpoint(self.place / "third.ckpt")
            except CheckpointError as error:
                self.errors.append(str(error))
            self.left = sorted(os.listdir(self.place))
            trainer.save_checkpoint(self.place / "third.ckpt")


class SaveBlockingOnFullDisk(toys.pl.Callback):
    """A save in which rank 1 cannot write, and one after it in the same place."""

    def __init__(self, path: Path) -> None:
        self.path, self.error = path, ""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            try:
                with full_disk(1):
                    trainer.save_checkpoint(self.path)
            except CheckpointError as error:
                self.error = str(error)
            self.left = sorted(os.listdir(self.path.parent))
            trainer.save_checkpoint(self.path)


def full(folder: Path, model: str) -> dict[str, Any]:
    """Errors while writing: at the next save, and at the end of the run."""
    place = folder / "full"
    blocking = SaveBlockingOnFullDisk(folder / "blocking" / "one.ckpt")
    straight, kept = run("rlhf_zero2", model, 1, [blocking])
    saver = SaveOnFullDisk(place)
    trained, spy = run(RLHFDeepSpeedStrategy(2, async_save=True), model, 1, [saver])
    answer = {"errors": saver.errors, "left": saver.left, "files": sorted(os.listdir(place))}
    answer["loss"] = difference(trained.losses, straight.losses)
    answer["weight"] = weight_difference(spy.weights, kept.weights) if RANK == 0 else 0.0
    answer["step"] = verification.verify(place / "first.ckpt")["global_step"]
    answer |= {"blocking": blocking.error, "left by blocking": blocking.left}
    answer["blocking step"] = verification.verify(blocking.path)["global_step"]
    try:
        with full_disk(1):
            options = {"enable_checkpointing": True}
            last = ModelCheckpoint(folder / "last", save_on_train_epoch_end=True, filename="last")
            run(RLHFDeepSpeedStrategy(2, async_save=True), model, 1, [last], trainer=options)
    except CheckpointError as error:
        answer["at the end"] = str(error)
    answer["left at the end"] = sorted(os.listdir(folder / "last"))
    return answer


class SaveAndFail(toys.pl.Callback):
    """Saves, lets training go on and fails."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 3:
            trainer.save_checkpoint(self.place)
        if index == 4:
            raise ArithmeticError("no more")


class Waiting(logging.Handler):
    """Rank 0 says that it waits for a save that is being written, which is held until then."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self.gate = gate
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "still being written" in record.getMessage():
            self.texts.append(record.getMessage())
            self.gate.set()


@contextmanager
def held_until_waited_for() -> Iterator[list[str]]:
    """What is said of saves in the background, of which the first is held until training waits for it."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with held() as gate:
        log.addHandler(waiting := Waiting(gate))
        try:
            yield waiting.texts
        finally:
            log.removeHandler(waiting)


def failing(folder: Path, model: str) -> dict[str, Any]:
    """A run that fails while its checkpoint is being written."""
    with held_until_waited_for() as texts:
        try:
            run(RLHFDeepSpeedStrategy(3, async_save=True), model, 1, [SaveAndFail(folder / "failing.ckpt")])
        except ArithmeticError as error:
            saved = verification.verify(folder / "failing.ckpt")
            return {"error": str(error), "step": saved["global_step"], "waited": texts}
    return {}


def links(folder: Path, model: str) -> dict[str, Any]:
    """ModelCheckpoint that keeps two checkpoints of every step and a link to the last."""
    place = folder / "links"
    saver = ModelCheckpoint(place, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 1}
    with held_until_waited_for() as texts:
        run(RLHFDeepSpeedStrategy(2, async_save=True), model, 1, [saver], trainer=options)
    resumed, _ = run("rlhf_zero2", model, 2, [], place / "last.ckpt", trainer={"accumulate_grad_batches": 1})
    return {
        "left": sorted(os.listdir(place)),
        "last": os.readlink(place / "last.ckpt"),
        "waited": texts,
        "batches after the resume": len(resumed.losses),
    }


def everything(folder: Path, model: str) -> dict[str, Any]:
    """All cases in one launch."""
    shared = folder / "shared"
    return {
        **{f"stage {stage}": bitwise(shared, model, stage) for stage in (1, 3)},
        "full": full(shared, model),
        "failing": failing(shared, model),
        "links": links(shared, model),
    }
