"""``trainer.fit`` on two ranks of a real Ray gives the driver what a run in its own process would.

Covers strategies/ray/remote_run.py.
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerStatus
from rl_runs import weights
from torch import Tensor

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.ray import remote_run
from rlhfkit.strategies.ray.remote_run import RunResult
from strategies.parity_cases import weight_difference
from strategies.toys import ShareLoader, Toy, global_batches, trainer

pytestmark = [pytest.mark.ray, pytest.mark.distributed]
HOOKS = [name for name in vars(L.Callback) if name.startswith(("setup", "on_fit", "on_train", "teardown"))]


class Watched(Toy):
    """Logs the loss over all ranks, says which rank it is, predicts."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        self.log("loss", loss.detach(), prog_bar=True, sync_dist=True)
        if batch_index == 0:
            print(f"first batch on rank {self.global_rank}")
        return loss

    def predict_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self.policy(input_ids=batch).logits[:, -1].argmax(-1)


class Failing(Watched):
    """Fails on all ranks in the third batch."""

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        if batch_index == 2:
            raise ArithmeticError("no more")
        return super().training_step(batch, batch_index)


class SharedBatches(L.LightningDataModule):
    """Each rank's share of three batches; remembers how many epochs it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0

    def share(self) -> ShareLoader:
        assert self.trainer is not None
        return ShareLoader(global_batches(3), self.trainer.global_rank, self.trainer.world_size)

    def train_dataloader(self) -> ShareLoader:
        self.epochs += 1
        return self.share()

    def val_dataloader(self) -> ShareLoader:
        return self.share()

    def predict_dataloader(self) -> ShareLoader:
        return self.share()

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class HookRecorder(L.Callback):
    """The order in which Lightning calls hooks; its state comes back from the ranks as any callback's does."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"called": list(self.called)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called[:] = state["called"]


for hook in HOOKS:
    setattr(HookRecorder, hook, lambda self, *inputs, hook=hook, **more: self.called.append(hook))


def on_ray(stage: int, **arguments: Any) -> RLHFDeepSpeedStrategy:
    return RLHFDeepSpeedStrategy(stage, launcher="ray", resources_per_rank={"CPU": 0.5}, **arguments)


def make_trainer(strategy: Any, devices: int, folder: Path, *callbacks: Any) -> Any:
    return trainer(
        strategy,
        devices,
        max_epochs=2,
        default_root_dir=str(folder),
        enable_checkpointing=True,
        enable_progress_bar=any(isinstance(one, TQDMProgressBar | RichProgressBar) for one in callbacks),
        enable_model_summary=False,
        callbacks=[HookRecorder(), ModelCheckpoint(monitor="loss", save_top_k=2, filename="{epoch}"), *callbacks],
    )


def state_after(trainer: Any, data: SharedBatches) -> dict[str, Any]:
    """What the driver knows after a run."""
    saved = trainer.checkpoint_callback
    return {
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.total_batch_idx,
        "status": trainer.state.status,
        "hooks": trainer.callbacks[0].called,
        "best": Path(saved.best_model_path).relative_to(trainer.default_root_dir),
        "score": pytest.approx(float(saved.best_model_score), abs=1e-6),
        "kept": sorted(Path(path).name for path in saved.best_k_models),
        "epochs of data": data.epochs,
        "loss": pytest.approx(float(trainer.callback_metrics["loss"]), abs=1e-6),
        "logged": pytest.approx(float(trainer.logged_metrics["loss"]), abs=1e-6),
    }


def test_large_weights_stay_on_the_ranks_unless_asked_for_and_a_line_says_what_to_use(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer("auto", 1, tmp_path)
    trainer.fit(Watched(model_folder), datamodule=SharedBatches())
    size = sum(tensor.nbytes for tensor in trainer.lightning_module.state_dict().values())
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):  # programs of other tests quieten it
        monkeypatch.setattr(remote_run, "MAX_RETURNED_BYTES", 2 * size)
        assert RunResult.collect(trainer, None, return_weights=None).weights is not None
        assert "not sent" not in caplog.text
        monkeypatch.setattr(remote_run, "MAX_RETURNED_BYTES", size / 2)
        collected = RunResult.collect(trainer, None, return_weights=True).weights
        assert collected.keys() == trainer.lightning_module.state_dict().keys()
        assert RunResult.collect(trainer, None, return_weights=None).weights is None
        monkeypatch.setattr(remote_run, "MAX_RETURNED_BYTES", 2 * size)
        assert RunResult.collect(trainer, None, return_weights=False).weights is None
    (line,) = [record.message for record in caplog.records if "not sent" in record.message]
    assert "not sent to the driver" in line
    assert "HFExport or ModelCheckpoint" in line


def test_the_driver_gets_what_a_run_in_its_own_process_gives(
    ray_session: None, model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sharded weights too: ranks with ZeRO 3, and a reference, which is not trained."""
    # A new AdamW would blow differences of 1e-7 between the weights that the second fit starts from up to 1e-4.
    plain_module, plain_data = Watched(model_folder, optimizer="sgd", reference=True), SharedBatches()
    untrained = Watched(model_folder)
    untrained.configure_model()
    plain = make_trainer("auto", 1, tmp_path / "plain")
    module, data = Watched(model_folder, optimizer="sgd", reference=True), SharedBatches()
    trainer = make_trainer(on_ray(3), 2, tmp_path / "ray", TQDMProgressBar())
    for epochs in (2, 3):  # a second fit of the same Trainer goes on where the first has stopped
        plain.fit_loop.max_epochs = trainer.fit_loop.max_epochs = epochs
        plain.fit(plain_module, datamodule=plain_data)
        capsys.readouterr()
        trainer.fit(module, datamodule=data)
        output = capsys.readouterr().out
        assert state_after(trainer, data) == state_after(plain, plain_data)
        assert trainer.state.status == TrainerStatus.FINISHED
        assert weight_difference(weights(module), weights(plain_module)) < 1e-6
        assert weight_difference(weights(module), weights(untrained)) > 1e-3
        assert Path(trainer.checkpoint_callback.best_model_path).is_dir()
        # The bar is rank 0's; lines of ranks are whole lines above it.
        lines = output.replace("\r", "\n").splitlines()
        assert {"first batch on rank 0", "[rank 1] first batch on rank 1"} <= {line.strip() for line in lines}
        loss = float(f"{trainer.progress_bar_metrics['loss']:.3g}")  # as tqdm shows it
        full = [line for line in lines if line.startswith(f"Epoch {epochs - 1}: 100%")]
        assert f"loss={loss:.3f}" in full[-1]
    predictions = trainer.predict(module, datamodule=data)
    expected = plain.predict(plain_module, datamodule=plain_data)
    assert [one.tolist() for one in predictions] == [one[0::2].tolist() for one in expected]  # rank 0's share
    assert "Predicting" in capsys.readouterr().out
    (metrics,) = trainer.validate(module, datamodule=data)
    assert "validation_loss" in capsys.readouterr().out
    assert metrics == pytest.approx(plain.validate(plain_module, datamodule=plain_data)[0], abs=1e-6)


def test_an_error_in_training_runs_its_hooks_on_the_ranks(
    ray_session: None,
    model_folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under Rich's bar, in whose place rank 0 draws one of plain text until then."""
    monkeypatch.setattr("rlhfkit.strategies.ray.ranks._GRACE_SECONDS", 300.0)  # between the errors of two busy ranks
    saved = OnExceptionCheckpoint(tmp_path, filename="stopped")
    trainer = make_trainer(on_ray(2), 2, tmp_path, RichProgressBar(), saved)
    with pytest.raises(ArithmeticError, match="no more") as caught:
        trainer.fit(Failing(model_folder), datamodule=SharedBatches())
    assert "test_ray_launcher_fit.py" in str(caught.value.__cause__)
    assert "Epoch 0: " in capsys.readouterr().out
    assert trainer.state.status == TrainerStatus.INTERRUPTED
    # Saved by the ranks with their engines; the driver, where the hook runs too, has not written over it.
    manifest = json.loads((tmp_path / "stopped.ckpt" / "manifest.json").read_text())
    assert (manifest["global_step"], manifest["world_size"], manifest["engines"]) == (2, 2, {"policy": 2})
