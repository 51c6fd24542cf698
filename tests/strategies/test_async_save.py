"""A checkpoint written in the background is the one that a blocking save writes, whatever happens meanwhile.

Covers strategies/checkpoint/saving.py and strategies/checkpoint/engine_files.py.
"""

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import SaveAt

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.checkpoint import directory, engine_files, verification
from strategies import toys
from strategies.parity_cases import RANK, check_equal, run, same
from strategies.ranks import on_two_ranks


def test_a_snapshot_is_a_copy_in_which_tensors_share_what_they_shared() -> None:
    flat = torch.arange(10.0)
    parameter = torch.nn.Parameter(flat[2:6].view(2, 2))
    value = {"flat": flat, "view": parameter, "set": {1}, "half": torch.ones(3, dtype=torch.bfloat16), "none": None}
    copy, num_bytes = engine_files.snapshot(value)
    assert num_bytes == 40 + 6
    flat.zero_()
    value["half"].zero_()
    value["set"].add(2)
    assert copy["flat"].tolist() == list(range(10))
    assert copy["view"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(copy["view"], torch.nn.Parameter)
    assert copy["view"].untyped_storage().data_ptr() == copy["flat"].untyped_storage().data_ptr()
    assert copy["half"].tolist() == [1, 1, 1]
    assert copy["half"].dtype == torch.bfloat16
    assert copy["set"] == {1}


@pytest.mark.cuda
def test_a_snapshot_of_a_gpu_takes_as_much_main_memory_as_it_has() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    value = torch.arange(11_000_000, device="cuda")  # three pieces
    copy, num_bytes = engine_files.snapshot({"value": value})
    value.zero_()
    assert not copy["value"].is_pinned()  # such memory is rounded up to a power of two
    assert num_bytes == copy["value"].untyped_storage().nbytes() == 88_000_000
    assert torch.equal(copy["value"], torch.arange(11_000_000))


@pytest.mark.parametrize("size", [0, 1, 8, 9, 16, 100])
def test_pieces_of_a_copy_are_all_of_it_through_two_of_them(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "PIECE_BYTES", 8)
    allocated: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: allocated.extend(sizes) or empty(*sizes, **options))
    source, target = torch.arange(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    engine_files.copy_in_pieces(source, target)
    assert torch.equal(target, source)
    assert allocated == [min(size, 8)] * 2


# ---------------------------------------------------------------- two ranks


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
        self.place, self.gate = place, gate

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 3:
            for name in ("blocking", "background"):
                trainer.strategy.async_save = name == "background"
                trainer.save_checkpoint(self.place / f"{name}.ckpt")
        if index == 5:
            assert not (self.place / "background.ckpt").exists(), "training went on before the file was written"
            self.gate.set()


@on_two_ranks
def test_what_is_written_later_is_the_state_of_the_save_and_resumes_bitwise(folder: Path, model: str) -> None:
    for stage in (1, 3):
        strategy, place = RLHFDeepSpeedStrategy(stage, async_save=True), folder / f"stage{stage}"
        with held() as gate:
            straight = run(strategy, model, 1, [SaveBothWays(place, gate)])
        paths = [place / "blocking.ckpt", place / "background.ckpt"]
        assert {name for name in os.listdir(place) if not name.endswith(".tmp")} == {path.name for path in paths}
        sizes = [verification.verify(path)["files"] for path in paths]
        assert sizes[0].keys() == sizes[1].keys()
        own = directory.files_of_rank(paths[1], RANK)
        for name in (one for one in own if one.endswith(".pt")):
            assert same(*(torch.load(path / name, weights_only=False) for path in paths)), name
        share = strategy.snapshot_bytes / sum(sizes[1][name] for name in own)
        assert 0.3 < share <= 1.0, f"{share}: the rest of these small files are names and scripts"
        resumed = run(RLHFDeepSpeedStrategy(stage, async_save=True), model, 1, [], paths[1])
        check_equal(resumed, straight, f"stage {stage}", skipped=4)


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
    """The first save succeeds, the second fails on rank 1: an error on all, of the next save if in the background."""

    def __init__(self, place: Path, *, background: bool) -> None:
        self.place, self.background = place, background

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            trainer.save_checkpoint(self.place / "first.ckpt")
            trainer.strategy.wait_for_saves()
        if index == 3:
            # And not the time limit of the process group.
            with pytest.raises(CheckpointError, match=r"second\.ckpt could not be written") as caught:
                self.save_on_full_disk(trainer)
            said = str(caught.value)
            for words in ("A checkpoint was not saved in the background", "written: File too large"):
                assert (words in said) == self.background, said
            if RANK == 0:
                assert "rank 1 failed" in said, said
                assert os.listdir(self.place) == ["first.ckpt"], "rank 0 deletes what was written"
            trainer.save_checkpoint(self.place / "third.ckpt")

    def save_on_full_disk(self, trainer: Any) -> None:
        """Fails when training goes on, if in the background."""
        with full_disk(1):
            trainer.save_checkpoint(self.place / "second.ckpt")
            trainer.strategy._background_save._thread.join()
        trainer.save_checkpoint(self.place / "third.ckpt")


@on_two_ranks
def test_a_full_disk_of_one_rank_is_one_error_on_all_and_harms_neither_training_nor_the_checkpoint_before(
    folder: Path, model: str
) -> None:
    """Errors while writing, too, at the end of a run."""
    runs = []
    for background in (False, True):
        place = folder / str(background)
        saver = SaveOnFullDisk(place, background=background)
        runs.append(run(RLHFDeepSpeedStrategy(2, async_save=background), model, 1, [saver]))
        assert sorted(os.listdir(place)) == ["first.ckpt", "third.ckpt"]
        assert [verification.verify(path)["global_step"] for path in sorted(place.iterdir())] == [1, 2]
    check_equal(*runs, "blocking and in the background")
    last = ModelCheckpoint(folder / "last", save_on_train_epoch_end=True, filename="last")
    with full_disk(1), pytest.raises(CheckpointError, match=r"last.ckpt could not be written"):
        run(RLHFDeepSpeedStrategy(2, async_save=True), model, 1, [last], trainer={"enable_checkpointing": True})
    assert RANK > 0 or os.listdir(folder / "last") == []


@contextmanager
def held_until_waited_for() -> Iterator[list[str]]:
    """What is said of saves in the background, of which the first is held until training waits for it."""
    log, texts = logging.getLogger("lightning.pytorch.utilities.rank_zero"), list[str]()
    with held() as gate:

        def noted(record: logging.LogRecord) -> bool:
            if "still being written" in record.getMessage():
                texts.append(record.getMessage())
                gate.set()
            return True

        log.addFilter(noted)
        try:
            yield texts
        finally:
            log.removeFilter(noted)


class Fail(toys.pl.Callback):
    """Fails after the fifth batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 4:
            raise ArithmeticError("no more")


@on_two_ranks
def test_a_run_that_fails_completes_the_checkpoint_that_is_being_written(folder: Path, model: str) -> None:
    path, strategy = folder / "failing.ckpt", RLHFDeepSpeedStrategy(3, async_save=True)
    with held_until_waited_for() as texts, pytest.raises(ArithmeticError, match="no more"):
        run(strategy, model, 1, [SaveAt(path, 4), Fail()])
    assert verification.verify(path)["global_step"] == 2
    assert RANK > 0 or "failing.ckpt, which is still being written" in texts[0]


@on_two_ranks
def test_deletions_and_links_follow_and_a_second_save_waits_and_says_so(folder: Path, model: str) -> None:
    """ModelCheckpoint keeps one checkpoint of every step and a link to the last."""
    saver = ModelCheckpoint(folder / "links", filename="{step}", every_n_train_steps=1, save_top_k=1, save_last="link")
    options = {"enable_checkpointing": True, "accumulate_grad_batches": 1}
    with held_until_waited_for() as texts:
        run(RLHFDeepSpeedStrategy(2, async_save=True), model, 1, [saver], trainer=options)
    assert RANK > 0 or "step=1.ckpt, which is still being written" in texts[0]
    last = folder / "links" / "last.ckpt"
    resumed = run("rlhf_zero2", model, 2, [], last, trainer={"accumulate_grad_batches": 1})
    assert len(resumed.losses) == 6
    assert sorted(os.listdir(last.parent)) == ["last.ckpt", "step=6.ckpt"]
    assert os.readlink(last) == "step=6.ckpt"
