"""What one rank runs for the tests of resuming with another number of ranks."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import SaveAt
from torch import Tensor

import rlhfkit.strategies  # noqa: F401  (registers the names)
from rlhfkit.checkpoints import CheckpointError
from rlhfkit.modules.optimizers import Muon
from rlhfkit.strategies.checkpoint.slow_steps import on_rank_zero
from strategies import toys
from strategies.parity_cases import RANK, RANKS, Spy

STAGES = (0, 1, 2, 3)


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


def run(stage: int, model: str, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any) -> Any:
    """Four global batches an epoch, accumulation 2."""
    data = options.pop("data", toys.ShareLoader)
    trainer_options = {"accumulate_grad_batches": 2} | options.pop("trainer", {})
    module, spy = TwoGroups(model, critic=True, **options), Spy()
    trainer = toys.trainer(
        f"rlhf_zero{stage}", RANKS, max_epochs=epochs, callbacks=[spy, *callbacks], **trainer_options
    )
    trainer.fit(module, data(toys.global_batches(4), RANK, RANKS), ckpt_path=resume)
    return module, spy, trainer


def special_cases(tied: str, saved_by: int) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, stage and options of what one of the two numbers of ranks saves; the usual case is saved by both."""
    if saved_by == 1:
        return [("bf16", 3, {"trainer": {"precision": "bf16-true"}}), ("muon", 0, {"optimizer": "muon"})]
    return [
        ("tied", 3, {"model": tied}),
        ("sgd", 2, {"optimizer": "sgd"}),
        ("muon", 0, {"optimizer": "muon"}),
        ("muon", 2, {"optimizer": "muon"}),
    ]


def save(folder: Path, model: str, place: str, tied: str) -> None:
    """Checkpoints in the middle of an epoch at every stage, and at the end of one."""
    for stage in STAGES:
        run(stage, model, 1, [SaveAt(Path(place) / f"{RANKS}-{stage}" / "middle.ckpt", 2)])
    for name, stage, options in special_cases(tied, RANKS):
        where = Path(place) / f"{RANKS}-{name}-{stage}"
        run(stage, options.pop("model", model), 1, [SaveAt(where / "middle.ckpt", 2)], **options)
    where = Path(place) / f"{RANKS}-fixed"
    saver = ModelCheckpoint(dirpath=where, filename="end", save_on_train_epoch_end=True)
    options = {"data": FixedSize, "trainer": {"enable_checkpointing": True, "accumulate_grad_batches": 4 // RANKS}}
    run(2, model, 1, [saver, SaveAt(where / "middle.ckpt", 4 // RANKS)], **options)


def resume(folder: Path, model: str, place: str, tied: str, saved_by: int) -> dict[str, Any]:
    """The rest of what another (or the same) number of ranks began; and one attempt at another ZeRO stage."""
    report: dict[str, Any] = {}
    cases: list[tuple[str, str, int, dict[str, Any]]] = []
    cases += [(f"stage {stage}", f"{stage}", stage, {}) for stage in STAGES]
    for name, stage, more in special_cases(tied, saved_by):
        if name != "sgd" or saved_by != RANKS:  # with the same number it resumes as any other
            cases.append((f"{name}, stage {stage}", f"{name}-{stage}", stage, more))
    for case, name, stage, options in cases:
        where = Path(place) / f"{saved_by}-{name}"
        for path in sorted(where.iterdir()):
            report[f"{case}, {path.stem}"] = attempt(
                stage, path, folder / f"{name}-{path.stem}.pt", **({"model": model} | options)
            )
    path = Path(place) / f"{saved_by}-2" / "middle.ckpt"
    report["stage 2 to 3, middle"] = attempt(3, path, folder / "2-to-3.pt", model=model)
    options = {"model": model, "data": FixedSize, "trainer": {"accumulate_grad_batches": 4 // RANKS}}
    for path in sorted((Path(place) / f"{saved_by}-fixed").iterdir()):
        if path.stem == "middle" and saved_by == RANKS:
            continue
        report[f"fixed size, {path.stem}"] = attempt(2, path, folder / f"fixed-{path.stem}.pt", **options)
    return report


def slow(folder: Path) -> list[str]:
    """Rank 0 does not end while the others wait, after a step that fails and one that works."""
    torch.distributed.init_process_group("gloo", rank=RANK, world_size=RANKS)
    answers = [on_rank_zero(lambda: f"from rank {RANK}", timeout=60, doing="answering")]

    def broken() -> str:
        raise CheckpointError("the disk is full")

    for step, timeout in ((broken, 60.0), (lambda: str(threading.Event().wait(600)), 1.0)):
        try:
            answers.append(on_rank_zero(step, timeout=timeout, doing="sleeping"))
        except CheckpointError as error:
            answers.append(str(error))
    return answers


def attempt(stage: int, path: Path, kept: Path, **options: Any) -> dict[str, Any]:
    """One resume, or its error."""
    before = {str(file): file.stat().st_mtime_ns for file in path.rglob("*")}
    try:
        epochs = 2 if path.stem == "end" else 1
        module, spy, trainer = run(stage, options.pop("model"), epochs, [], path, **options)
    except CheckpointError as error:
        return {"error": str(error), "left": sorted(os.listdir(path.parent))}
    if RANK == 0:
        torch.save(spy.weights, kept)
    return {
        "losses": module.losses,
        "rates": module.learning_rates,
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "seen": module.policy.seen.item(),
        "untouched": before == {str(file): file.stat().st_mtime_ns for file in path.rglob("*")},
        "left": sorted(os.listdir(path.parent)),
    }
