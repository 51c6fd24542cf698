"""A stopped and resumed run is bitwise the straight run; damage is found and named. Kills: test_kills.py.

Covers strategies/checkpoint/io.py.
"""

import os
import warnings
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import SaveAt

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.checkpoint import verification
from strategies import ranks, toys
from strategies.parity_cases import RANK, RANKS, check_equal, run
from strategies.test_directory import flip_a_byte, write


def validate(model: str, path: Path, stage: int = 3) -> float:
    """Validation loss of a checkpoint on the batch that training would see next, without dropout."""
    module = toys.Toy(model, critic=True, reference=True)
    data = toys.ShareLoader(toys.global_batches(1), RANK, RANKS)
    trainer = toys.trainer(f"rlhf_zero{stage}", RANKS)
    return trainer.validate(module, data, ckpt_path=path, verbose=False)[0]["validation_loss"]


def resume(folder: Path, model: str) -> float:
    """Straight runs against stopped and resumed ones, at the end and in the middle of an epoch; what stage 3 validates.

    Two engines, a frozen reference, which is not saved, dropout, accumulation and a schedule.
    """
    losses = []
    for stage, precision in [*((stage, "32-true") for stage in range(4)), (0, "bf16-true"), (1, "bf16-true")]:
        name, place = f"rlhf_zero{stage}", folder / f"stage{stage}-{precision}"
        saver = ModelCheckpoint(place, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        saves = [SaveAt(place / "middle.ckpt", 2), SaveAt(place / "window.ckpt", 3), saver]
        options = {"precision": precision, "enable_checkpointing": True}
        straight = run(name, model, 2, saves, batches=4, trainer=options)
        assert saver.best_model_path.endswith("epoch=1.ckpt")
        for moment, done in {"epoch=0": 4, "middle": 2, "window": 2}.items():
            if moment == "window" and stage < 2:
                continue
            path, what = place / f"{moment}.ckpt", f"stage {stage}, {precision}, {moment}"
            resumed = run(name, model, 2, [], path, batches=4, trainer={"precision": precision})
            check_equal(resumed, straight, what, skipped=done)
            assert resumed.module.learning_rates == straight.module.learning_rates[done:], what
            assert sorted(os.listdir(path)) == ["critic", "manifest.json", "policy", "rank_00000.pt", "rank_00001.pt"]
        if precision == "32-true":
            losses.append(validate(model, place / "epoch=0.ckpt", stage))
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-6), losses
    assert losses[0] < 3.95, "training has moved the weights: the untrained loss of this batch is 4.02"
    return losses[3]


def on_one_rank(folder: Path, model: str, path: str) -> float:
    """What two ranks have saved at stage 3, validated."""
    return validate(model, Path(path))


@ranks.on_two_ranks
def test_damage_is_named_and_the_previous_checkpoint_is_used(folder: Path, model: str) -> None:
    """Resumes from a checkpoint of stage 2 with a flipped byte in what rank 1 has saved, and from a missing one.

    All ranks learn what one has found, and take the newest of the others.
    """
    saves = [SaveAt(folder / f"{name}.ckpt", batch) for name, batch in (("middle", 2), ("window", 3), ("end", 4))]
    run("rlhf_zero2", model, 1, saves, batches=4)
    file = folder / "end.ckpt" / "policy" / "checkpoint" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if RANK == 0:
        flip_a_byte(file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run("rlhf_zero2", model, 2, [], folder / "end.ckpt", batches=4)
    assert len(resumed.losses) == 6, "resumed from the window (2 of 8 batches done), not from the end (4)"
    if RANK == 0:
        (warning,) = [str(one.message) for one in caught if "damaged" in str(one.message)]
        for words in (
            f"{file.name} is damaged (Bad CRC-32",
            "(Found by rank 1.)",
            "window.ckpt",
            "1 optimizer steps are lost: it is of step 1, not of step 2.",
        ):
            assert words in warning, warning
    with pytest.raises(CheckpointError, match=r"typo.ckpt does not exist"):
        run("rlhf_zero2", model, 2, [], folder / "typo.ckpt")


@pytest.mark.distributed
def test_resume_is_bitwise_the_straight_run_and_evaluation_is_the_same_from_every_stage_and_number_of_ranks(
    tmp_path: Path, model_folder: str
) -> None:
    loss = ranks.run(resume, 2, tmp_path, model=model_folder)[0]
    path = str(tmp_path / "stage3-32-true" / "epoch=0.ckpt")
    assert ranks.run(on_one_rank, 1, tmp_path, model=model_folder, path=path) == [pytest.approx(loss, abs=1e-6)]


@pytest.mark.distributed
def test_the_last_complete_checkpoint_is_never_deleted(tmp_path: Path) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=0)
    for name in ("a.ckpt", "b.ckpt"):
        write(tmp_path / name, name, 0.0)
    (tmp_path / "b.ckpt" / "rank_00000.pt").unlink()
    with pytest.warns(UserWarning, match="only complete checkpoint"):
        strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert verification.verify(tmp_path / "a.ckpt")
    strategy.remove_checkpoint(tmp_path / "b.ckpt")  # the broken one may go
    assert os.listdir(tmp_path) == ["a.ckpt"]
