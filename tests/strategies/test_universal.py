"""Training resumes with another number of ranks as with the same one, and not at another ZeRO stage.

Covers strategies/checkpoint/universal.py and strategies/checkpoint/slow_steps.py.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import SaveAt
from torch import Tensor

import rlhfkit.strategies  # noqa: F401  (registers the names)
from rlhfkit.checkpoints import CheckpointError
from rlhfkit.modules.optimizers import Muon
from rlhfkit.strategies.checkpoint.slow_steps import on_rank_zero
from strategies import ranks, toys
from strategies.parity_cases import RANK, RANKS, Spy, check_equal, fit

pytestmark = pytest.mark.distributed


class Case(NamedTuple):
    """A checkpoint in the middle of an epoch."""

    stage: int
    saved_by: tuple[int, ...] = (1, 2)
    tolerance: float = 1e-6
    options: dict[str, Any] = {}


# torch's Muon rounds its momentum to bfloat16; lost momenta are 1e-3 off.
MUON: dict[str, Any] = {"tolerance": 5e-5, "options": {"optimizer": "muon"}}
CASES = {
    **{f"stage {stage}": Case(stage) for stage in range(4)},
    "tied": Case(3, saved_by=(2,)),
    # 16-bit weights of 0.1 are 5e-4 apart, and a sum in another order may end on the other side.
    "bf16": Case(3, saved_by=(1,), tolerance=5e-3, options={"trainer": {"precision": "bf16-true"}}),
    "muon, stage 0": Case(0, saved_by=(1,), **MUON),
    "muon, stage 2": Case(2, saved_by=(2,), **MUON),
}


class TwoGroups(toys.Toy):
    """Two engines, of which the policy has groups with different weight decay, and a buffer."""

    def configure_model(self) -> None:
        first = not hasattr(self, "policy")
        super().configure_model()
        if first:
            self.policy.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.policy.module.seen += 1
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "sgd":
            return torch.optim.SGD([{"params": self.policy.parameters()}, {"params": self.critic.parameters()}], lr=0.1)
        plan = super().configure_optimizers()
        muon = self.hparams.optimizer == "muon"
        matrices = [p for p in self.policy.parameters() if getattr(p, "ds_shape", p.shape)[1:]]
        vectors = [p for p in self.policy.parameters() if not getattr(p, "ds_shape", p.shape)[1:]]
        optimizer = (Muon if muon else torch.optim.AdamW)(
            [
                {"params": matrices, "weight_decay": 0.3, "lr": 3e-3, **({"kind": "matrices"} if muon else {})},
                {"params": vectors, "weight_decay": 0.0, "lr": 1e-3, "betas": (0.8, 0.95)},
                {"params": self.critic.parameters(), "lr": 2e-3, "fused": True},
            ]
        )
        plan["lr_scheduler"]["scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return plan | {"optimizer": optimizer}


class FixedSize(toys.ShareLoader):
    """Four rows per rank and micro-batch: two ranks have half as many micro-batches as one, and no position to save."""

    def __init__(self, batches: list[Tensor], rank: int, world_size: int) -> None:
        rows = torch.cat(batches).split(4)
        self.shares = list(rows[rank::world_size])

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.shares)

    state_dict = load_state_dict = None  # type: ignore[assignment]  # a loader without state, as most are


def run(stage: int, model: str, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any) -> Spy:
    """Four global batches an epoch, accumulation 2."""
    trainer = {"accumulate_grad_batches": 2, "loader": toys.ShareLoader} | options.pop("trainer", {})
    module = TwoGroups(model, critic=True, **options)
    return fit(module, f"rlhf_zero{stage}", callbacks=callbacks, resume=resume, max_epochs=epochs, **trainer)


def fixed_size(**trainer: Any) -> dict[str, Any]:
    """Options of runs whose loaders do not say where they stand; eight micro-batches of four rows an epoch."""
    return {"trainer": {"loader": FixedSize, "accumulate_grad_batches": 4 // RANKS} | trainer}


def save(folder: Path, models: dict[str, str]) -> None:
    """Checkpoints in the middle of an epoch, and at the end of one; what the same ranks go on with, bit for bit."""
    for name, case in CASES.items():
        if RANKS in case.saved_by:
            path, model = folder / f"{name}.ckpt", models.get(name, models["usual"])
            straight = run(case.stage, model, 1, [SaveAt(path, 2)], **case.options)
            resumed = run(case.stage, model, 1, [], path, **case.options)
            check_equal(resumed, straight, name, skipped=2)
            if RANK == 0:
                torch.save((resumed.losses, resumed.weights, resumed.module.learning_rates), folder / f"{name}.pt")
    run(2, models["usual"], 1, [SaveAt(folder / "sgd.ckpt", 2)], optimizer="sgd")
    end = ModelCheckpoint(dirpath=folder, filename="end", save_on_train_epoch_end=True)
    savers = [end, SaveAt(folder / "inside.ckpt", 4 // RANKS)]
    run(2, models["usual"], 1, savers, **fixed_size(enable_checkpointing=True))


@contextmanager
def only_read(place: Path) -> Iterator[None]:
    """Checkpoints are as they were in the end, and no copy is left beside them."""

    def files() -> dict[Path, int]:
        return {file: file.stat().st_mtime_ns for file in place.rglob("*")}

    before = files()
    yield
    assert RANK > 0 or files() == before


def resume(folder: Path, models: dict[str, str], place: str, saved_by: int) -> None:
    """The rest of what another number of ranks began."""
    saved, model = Path(place), models["usual"]
    for name, case in CASES.items():
        if saved_by in case.saved_by:
            own = models.get(name, model)
            with only_read(saved):
                found, same = run(case.stage, own, 1, [], saved / f"{name}.ckpt", **case.options), Spy()
            module, trainer = found.module, found.module.trainer
            assert (trainer.global_step, trainer.current_epoch) == (2, 1), name
            assert module.policy.seen.item() == 4, "a buffer that counts batches"
            same.losses, same.weights, rates = torch.load(saved / f"{name}.pt")
            assert module.learning_rates == rates, name
            check_equal(found, same, name, case.tolerance)
    # After an epoch the next one is dealt to the new ranks: all micro-batches for one rank, four for each of two.
    found = run(2, model, 2, [], saved / "end.ckpt", **fixed_size())
    trainer = found.module.trainer
    assert (len(found.losses), trainer.global_step, trainer.current_epoch) == (8 // RANKS, 4, 2)
    inside = rf"saved by {saved_by} rank\(s\) inside an epoch.*do not say where they stood"
    refused = [
        (3, "stage 2", {}, r"at the ZeRO stages \{'(critic|policy)': 2, .*the number of ranks may be another one"),
        (2, "inside", fixed_size(), inside),
    ]
    if saved_by == 2:
        nothing = r"keeps nothing\. The number of ranks changes only for optimizers that keep \['exp_avg'"
        refused.append((2, "sgd", {"optimizer": "sgd"}, nothing))
    for stage, name, options, message in refused:
        with only_read(saved), pytest.raises(CheckpointError, match=message):
            run(stage, model, 1, [], saved / f"{name}.ckpt", **options)


@pytest.mark.parametrize("saved_by", [1, 2])
def test_a_run_goes_on_with_another_number_of_ranks_as_with_the_same_or_says_why_it_cannot(
    tmp_path: Path, model_folder: str, tied_model_folder: str, saved_by: int
) -> None:
    """Two engines, groups of different learning rate and weight decay, a schedule, Adam's moments and a buffer."""
    models, saved = {"usual": model_folder, "tied": tied_model_folder}, tmp_path / "saved"
    ranks.run(save, saved_by, saved, models=models)
    ranks.run(resume, 3 - saved_by, tmp_path / "other", models=models, place=str(saved), saved_by=saved_by)


def slow(folder: Path) -> None:
    """Rank 0 does not end while the others wait, after a step that works and one that fails."""
    torch.distributed.init_process_group("gloo", rank=RANK, world_size=RANKS)
    assert on_rank_zero(lambda: f"from rank {RANK}", timeout=60, doing="answering") == "from rank 0"

    def broken() -> str:
        raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match=r"^the disk is full$"):
        on_rank_zero(broken, timeout=60, doing="sleeping")
    with pytest.raises(CheckpointError, match=r"sleeping .*checkpoint_timeout\) took longer than 1 s on rank 0"):
        on_rank_zero(lambda: threading.Event().wait(600), timeout=1.0, doing="sleeping")


def test_an_error_of_rank_0_is_everybodys_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    ranks.run(slow, 2, tmp_path)
