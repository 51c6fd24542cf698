"""Runs resumed from any checkpoint, any number of times, equal the straight run.

Covers checkpoints/resume.py too.
"""

import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpoints.toy_runs import BATCHES, EPOCHS, SaveEverywhere, fit
from rlhfkit.checkpoints import CheckpointError, ExactResume, VerifiedCheckpointIO

CASES = {
    "every batch a step": {"accumulate_grad_batches": 1},
    "windows": {"accumulate_grad_batches": 2, "last": True},
    "windows, somebody else's loader": {"accumulate_grad_batches": 2, "ours": False},
    "windows, validation in them": {
        "accumulate_grad_batches": 2,
        "limit_val_batches": 1.0,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    },
    "a number of steps": {"accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 8},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_checkpoint_of_any_moment_resumes_bitwise_at_its_last_optimizer_step(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    saver = SaveEverywhere(tmp_path / "saved")
    straight = fit(tmp_path, callbacks=[saver], **options)
    assert len(straight.seen) >= 13
    assert len(saver.saved) > 45
    for name, done in saver.saved.items():
        resumed = fit(tmp_path, resume=saver.folder / f"{name}.ckpt", **options)
        assert resumed.seen == straight.seen[done:], name
        assert torch.equal(resumed.weights, straight.weights), name
        assert resumed.trainer.global_step == straight.trainer.global_step, name
        if resumed.seen:  # reaching max_steps inside an epoch counts the epoch, finding it reached does not
            assert resumed.trainer.current_epoch == straight.trainer.current_epoch, name


@pytest.mark.parametrize("seed", range(4))
def test_a_run_resumed_five_times_is_the_straight_one(tmp_path: Path, seed: int) -> None:
    options = {"accumulate_grad_batches": seed % 2 + 1, "ours": seed < 3}
    straight = fit(tmp_path, **options)
    choose, done, resume = random.Random(seed), 0, None
    for depth in range(6):
        saver = SaveEverywhere(tmp_path / str(depth))
        module = fit(tmp_path, resume=resume, callbacks=[saver], **options)
        assert [*straight.seen[:done], *module.seen] == straight.seen, f"resumed {depth} times"
        assert torch.equal(module.weights, straight.weights), f"resumed {depth} times"
        if not saver.saved:
            break
        # Last batches of an epoch are where Lightning miscounts; early ones leave something to resume.
        names = sorted(saver.saved)[: len(saver.saved) // 2]
        last = [name for name in names if name.endswith("batch_end") and (saver.saved[name] + done) % BATCHES == 0]
        name = choose.choice(last if last and depth % 2 == 0 else names)
        done, resume = done + saver.saved[name], saver.folder / f"{name}.ckpt"


def test_each_epoch_is_begun_once_and_counted(tmp_path: Path) -> None:
    """Lightning 2.6.6 alone begins the epoch after a resume from an epoch's last batch without telling anybody."""
    saver = SaveEverywhere(tmp_path / "saved")
    fit(tmp_path, callbacks=[saver])
    resumed = fit(tmp_path, resume=saver.path("batch_end", BATCHES))
    assert resumed.epochs_begun == EPOCHS - 1
    progress = resumed.trainer.fit_loop.epoch_progress
    assert progress.total.ready == progress.total.completed == EPOCHS


def test_plain_lightning_trains_too_long(tmp_path: Path) -> None:
    """What ``ExactResume`` corrects, to notice when Lightning does."""
    first, second = SaveEverywhere(tmp_path / "first"), SaveEverywhere(tmp_path / "second")
    fit(tmp_path, callbacks=[first], exact=False)
    fit(tmp_path, resume=first.path("batch_end", BATCHES), callbacks=[second], exact=False)
    again = fit(tmp_path, resume=second.path("batch_end", 2), exact=False)
    if len(again.seen) == 2 * BATCHES - 2:
        pytest.fail("Lightning counts right by now: progress.settle and its documentation can go")


class Stopping(L.Callback):
    """Raises in the middle of a batch, or while it is moved to the device."""

    def __init__(self, batch: int, where: str) -> None:
        self.left, self.where = batch, where

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.where == "moving":
            pl_module.transfer_batch_to_device = lambda batch, *_: (self.count(), batch)[1]

    def on_before_zero_grad(self, *_: Any) -> None:
        if self.where == "training":
            self.count()

    def count(self) -> None:
        self.left -= 1
        if not self.left:
            raise KeyError("no such answer")


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(("batch", "where"), [(2, "training"), (3, "training"), (3, "moving"), (4, "moving")])
def test_what_is_saved_on_an_exception_resumes_exactly(tmp_path: Path, batch: int, where: str, ours: bool) -> None:
    straight = fit(tmp_path, ours=ours, accumulate_grad_batches=2)
    saver = ModelCheckpoint(tmp_path / "saved", filename="failed", save_on_exception=True, save_top_k=0)
    options = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    with pytest.raises(KeyError, match="no such answer"):
        fit(tmp_path, ours=ours, callbacks=[saver, Stopping(batch, where)], **options)
    resumed = fit(tmp_path, ours=ours, resume=tmp_path / "saved" / "failed.ckpt", accumulate_grad_batches=2)
    assert torch.equal(resumed.weights, straight.weights)
    assert resumed.seen == straight.seen[-len(resumed.seen) :]


def test_after_a_resume_model_checkpoint_waits_for_the_next_step(tmp_path: Path) -> None:
    def saver(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    options = {"accumulate_grad_batches": 2, "enable_checkpointing": True}
    fit(tmp_path, callbacks=[saver("straight")], **options)
    fit(tmp_path, callbacks=[saver("resumed")], resume=tmp_path / "straight" / "step=4.ckpt", **options)
    names = {path.name for path in (tmp_path / "straight").iterdir()}
    assert {path.name for path in (tmp_path / "resumed").iterdir()} == names - {f"step={n}.ckpt" for n in range(1, 5)}


def test_a_checkpoint_inside_a_window_without_its_gradients_is_refused(tmp_path: Path) -> None:
    saver = SaveEverywhere(tmp_path / "saved")
    fit(tmp_path, callbacks=[saver], exact=False, accumulate_grad_batches=2)
    with pytest.raises(CheckpointError, match=r"saved after 1 micro-batches .* every 2"):
        fit(tmp_path, resume=saver.path("batch_end", 0), accumulate_grad_batches=2)


@pytest.mark.parametrize("overridden", ["configure_callbacks", "setup"])
def test_a_module_with_a_hook_that_forgets_super_brings_it_along_once(tmp_path: Path, overridden: str) -> None:
    from rl_runs import setup_run

    trainer, module, data, _ = setup_run(tmp_path, max_epochs=1)
    hooks: dict[str, Any] = {"configure_callbacks": lambda _: [L.Callback()], "setup": lambda _, stage: None}
    module.__class__ = type("Forgetful", (type(module),), {overridden: hooks[overridden]})
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert sum(isinstance(callback, ExactResume) for callback in trainer.callbacks) == 1
    assert isinstance(trainer.strategy.checkpoint_io, VerifiedCheckpointIO)
    assert "random_state" in torch.load(tmp_path / "end.ckpt", weights_only=False)
