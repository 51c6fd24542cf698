"""EMA against its definition, under plain Lightning and on two ranks of DeepSpeed, and exported: ``HFExport`` too."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from modules.data_runs import folder_of, texts, trainer
from rl_runs import RANKS, SaveAt
from strategies import ranks

from rlhfkit import EMA, HFExport, SFTDataModule, SFTModule
from rlhfkit.callbacks.ema import slice_of_shares
from rlhfkit.models import load_causal_lm

folder = folder_of(texts)
DECAY = 0.8


def weights(trainer: L.Trainer, module: L.LightningModule) -> dict[str, torch.Tensor]:
    """Copies of all weights, from any strategy; empty on the other ranks of DeepSpeed."""
    if hasattr(trainer.strategy, "consolidated_state_dict"):
        return trainer.strategy.consolidated_state_dict("policy")
    return {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


class Spy(L.Callback):
    """The weights behind each optimizer step; at the end the average, and whether swapping it left a trace."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.history: list[dict[str, torch.Tensor]] = []
        self.average: dict[str, torch.Tensor] = {}
        self.validated: list[dict[str, torch.Tensor]] = []
        self.same_afterwards = False

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *rest: Any) -> None:
        if len(self.history) < trainer.global_step:
            self.history.append(weights(trainer, module))

    def on_validation_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append(weights(trainer, module))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        before = [held(parameter).clone() for parameter in module.parameters()]
        with self.ema.applied(module):
            self.average = weights(trainer, module)
        after = [held(parameter) for parameter in module.parameters()]
        self.same_afterwards = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def held(parameter: Any) -> torch.Tensor:
    """What this rank holds of a parameter: all of it, or its ZeRO 3 shard."""
    return getattr(parameter, "ds_tensor", parameter).detach()


def fit(folder: Path, ema: EMA, *, ranks: int = 1, path: Path | None = None, **arguments: Any) -> Spy:
    """Two epochs of three steps; ``path``: resume from there."""
    spy = Spy(ema)
    spies = [ema, *arguments.pop("callbacks", []), spy]
    source = str(folder / "data.jsonl")
    data = SFTDataModule(source, validation_data=source, micro_batch_size=8 // ranks, max_length=32)
    module = SFTModule(str(folder / "model"), lr=1e-2)
    trainer(folder, devices=ranks, callbacks=spies, **arguments).fit(module, data, ckpt_path=path)
    return spy


def averaged(history: list[dict[str, torch.Tensor]], decay: float = DECAY) -> dict[str, torch.Tensor]:
    """The definition, in float64."""
    factors = [decay ** (len(history) - 1 - k) for k in range(len(history))]
    return {
        name: sum(f * step[name].double() for f, step in zip(factors, history, strict=True)) / sum(factors)
        for name in history[0]
    }


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference of any weight."""
    return max(((one[name].double() - other[name].double()).abs().max().item() for name in one), default=0.0)


class SaveAfterEpoch(L.Callback):
    """A checkpoint behind the first epoch: inside one, supervised data is not dealt to other ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def on_other_ranks(folder: Path, data: str, place: str) -> dict[str, Any]:
    """Resume on one rank what two have saved at ZeRO 3."""
    resumed = fit(Path(data), EMA(DECAY), path=Path(place) / "end3.ckpt", ranks=RANKS, strategy="rlhf_zero3")
    torch.save(resumed.average, folder / "average.pt")
    return {}


def on_ranks(folder: Path, data: str, stages: list[int]) -> list[int]:
    """What one rank runs at each stage; returns how much it averages itself."""
    found = []
    for stage in stages:
        path = folder / f"stage{stage}.ckpt"
        saves = [SaveAt(path, batch=4), SaveAfterEpoch(folder / f"end{stage}.ckpt")]
        common = {"strategy": f"rlhf_zero{stage}", "ranks": RANKS}
        straight = fit(Path(data), EMA(DECAY), callbacks=saves, **common)
        assert straight.same_afterwards
        if straight.average:  # on rank 0
            assert difference(straight.average, averaged(straight.history)) < 1e-6
            assert difference(straight.average, straight.history[-1]) > 1e-3
            torch.save(straight.average, folder / f"average-{stage}.pt")
        assert difference(straight.validated[-1], straight.average) == 0.0
        if stage > 1:
            assert difference(fit(Path(data), EMA(DECAY), path=path, **common).average, straight.average) == 0.0
        found.append(sum(average.numel() for average in straight.ema.state_dict()["average"].values()))
    return found


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Spy]:
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
            self.module, self.kept = module, weights(trainer, module)

        def on_validation_batch_start(self, trainer: Any, *rest: Any) -> None:
            if not trainer.sanity_checking:
                raise OSError("disk full")

    fails = Fails()
    with pytest.raises(OSError, match="disk full"):
        fit(folder, EMA(DECAY), callbacks=[fails])
    assert difference(fails.kept, dict(fails.module.policy.state_dict())) == 0.0


@pytest.mark.distributed
def test_two_ranks_of_deepspeed_average_their_shares(folder: Path, tmp_path: Path) -> None:
    shares = ranks.run(on_ranks, 2, tmp_path, data=str(folder), stages=[0, 2, 3])
    total = sum(tensor.numel() for tensor in load_causal_lm(str(folder / "model")).parameters())
    assert [sum(each) for each in zip(*shares, strict=True)] == [total] * 3

    one_rank = tmp_path / "one"
    ranks.run(on_other_ranks, 1, one_rank, data=str(folder), place=str(tmp_path))
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
