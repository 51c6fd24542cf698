"""EMA against its definition, under plain Lightning and on two ranks of DeepSpeed, and exported: ``HFExport`` too."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from modules.data_runs import folder_of, texts, trainer
from rl_runs import SaveAt
from strategies import ranks

from callbacks import ema_ranks
from callbacks.ema_ranks import DECAY, averaged, difference, fit
from rlhfkit import EMA, HFExport
from rlhfkit.callbacks.ema import slice_of_shares
from rlhfkit.models import load_causal_lm

folder = folder_of(texts)


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ema_ranks.Spy]:
    """A run that keeps checkpoints and exports in a folder."""
    place = tmp_path_factory.mktemp("straight")
    saver = ModelCheckpoint(place, monitor="val/loss", save_top_k=-1, filename="{epoch}", save_last=False)
    ema = EMA(DECAY, export=HFExport(place / "ema", every_n_epochs=1))
    keepers = [saver, SaveAt(place / "four.ckpt", batch=4), HFExport(place / "last", every_n_epochs=1, keep=1)]
    (place / "last").mkdir()
    (place / "last" / "of_an_earlier_run.txt").touch()
    return place, fit(folder, ema, callbacks=keepers, enable_checkpointing=True)


def test_the_average_is_its_definition_and_leaves_no_trace(folder: Path, straight: Any) -> None:
    _, run = straight
    assert len(run.history) == 6
    assert difference(run.average, averaged(run.history)) < 1e-6
    assert difference(run.average, run.history[-1]) > 1e-3
    assert run.same_afterwards
    plain = fit(folder, EMA(DECAY, validate=False))
    assert difference(plain.history[-1], run.history[-1]) == 0.0
    assert difference(plain.validated[1], run.history[-1]) == 0.0


@pytest.mark.parametrize(
    ("ema", "steps"), [(EMA(DECAY, start_step=1, every_n_steps=2), slice(2, None, 2)), (EMA(0.0), slice(-1, None))]
)
def test_start_and_interval_choose_the_steps_and_decay_0_is_the_last(folder: Path, ema: EMA, steps: slice) -> None:
    run = fit(folder, ema)
    assert difference(run.average, averaged(run.history[steps])) <= 1e-6 * ema.decay  # exactly, for 0


def test_in_bfloat16_the_average_is_still_one_in_float32(folder: Path) -> None:
    """With d = 0.999 one step moves the average by less than bfloat16 can tell."""
    ema = EMA(0.999)
    run = fit(folder, ema, precision="bf16-true")
    kept = ema.state_dict()["average"]
    exact = averaged(run.history, 0.999)
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    for name, tensor in kept.items():
        torch.testing.assert_close(tensor.double(), exact[name.removeprefix("policy.")].flatten(), rtol=1e-5, atol=1e-6)
    assert {tensor.dtype for tensor in run.average.values()} == {torch.bfloat16}


def test_validation_sees_the_average_and_checkpoints_the_weights(straight: Any) -> None:
    place, run = straight
    for epoch in range(2):
        history = run.history[: 3 * epoch + 3]
        assert difference(run.validated[epoch], averaged(history)) < 1e-6
        state = torch.load(place / f"epoch={epoch}.ckpt", weights_only=False)["state_dict"]
        saved = {name.removeprefix("policy."): tensor for name, tensor in state.items()}
        assert difference(history[-1], saved) == 0.0


def test_a_resumed_average_is_the_straight_one_bitwise(folder: Path, straight: Any) -> None:
    place, run = straight
    resumed = fit(folder, EMA(DECAY), path=place / "four.ckpt")
    assert len(resumed.history) < len(run.history)
    assert difference(resumed.average, run.average) == 0.0


def test_exports_are_whole_and_the_newest(straight: Any) -> None:
    """Of the average and of the weights; what was there before is gone."""
    place, run = straight
    expected = {"ema": run.average, "ema-epoch1": averaged(run.history[:3]), "ema-epoch2": averaged(run.history)}
    expected |= {"last": run.history[-1], "last-epoch2": run.history[-1]}
    assert {path.name for path in place.iterdir() if path.is_dir()} == {*expected}
    for name, weights in expected.items():
        assert difference(dict(load_causal_lm(str(place / name)).state_dict()), weights) < 1e-6, name
    assert not (place / "last" / "of_an_earlier_run.txt").exists()


def test_a_module_that_cannot_be_exported_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="which BoringModel does not have"):
        trainer(tmp_path, callbacks=[HFExport(tmp_path / "model")]).fit(BoringModel())


def test_an_error_in_validation_leaves_the_trained_weights_in_place(folder: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            self.module, self.kept = module, ema_ranks.weights(trainer, module)

        def on_validation_batch_start(self, trainer: Any, *rest: Any) -> None:
            if not trainer.sanity_checking:
                raise OSError("disk full")

    fails = Fails()
    with pytest.raises(OSError, match="disk full"):
        fit(folder, EMA(DECAY), callbacks=[fails])
    assert difference(fails.kept, dict(fails.module.policy.state_dict())) == 0.0


@pytest.mark.distributed
def test_two_ranks_of_deepspeed_average_their_shares(folder: Path, tmp_path: Path) -> None:
    shares = ranks.run("callbacks.ema_ranks:on_ranks", 2, tmp_path, data=str(folder), stages=[0, 2, 3])
    total = sum(tensor.numel() for tensor in load_causal_lm(str(folder / "model")).parameters())
    assert [sum(each) for each in zip(*shares, strict=True)] == [total] * 3

    one_rank = tmp_path / "one"
    ranks.run("callbacks.ema_ranks:on_other_ranks", 1, one_rank, data=str(folder), place=str(tmp_path))
    states = [torch.load(tmp_path / "end3.ckpt" / f"rank_0000{r}.pt", weights_only=True) for r in (0, 1)]
    averages = [state["callbacks"]["EMA"]["average"] for state in states]
    expected = {name: torch.cat([shares[name] for shares in averages]) for name in averages[0]}
    assert difference(expected, torch.load(one_rank / "start.pt")) == 0.0
    assert difference(torch.load(tmp_path / "average-3.pt"), torch.load(one_rank / "average.pt")) < 1e-6


@pytest.mark.parametrize("numel", [1, 5, 12, 97])
def test_any_number_of_ranks_reads_its_share_of_what_any_other_number_has_saved(numel: int) -> None:
    full = torch.arange(float(numel))
    for saved in range(1, 8):
        size = -(-numel // saved)
        shares = [{"weight": full[rank * size : (rank + 1) * size]} for rank in range(saved)]
        for count in range(1, 8):
            step = -(-numel // count)
            for start in range(0, numel, step):
                end = min(numel, start + step)
                found = slice_of_shares((saved, shares.__getitem__), "weight", numel, start, end)
                assert torch.equal(found, full[start:end])
    with pytest.raises(ValueError, match="of other weights"):
        slice_of_shares((saved, shares.__getitem__), "weight", 8 * numel, 0, 1)
