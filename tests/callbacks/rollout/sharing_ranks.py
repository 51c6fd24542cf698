"""What ranks do for the tests of iterations that are spread over ranks; several short fits in one process."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rank_store_ranks import raised
from rl_runs import RANK, RANKS, PlainGRPO, digits, fit_run, on_all_ranks, only_odd, samples_of_all_ranks, weights

from rlhfkit import (
    DynamicSampling,
    Invariants,
    LocalEngine,
    ReplayBuffer,
    RolloutCallback,
    RolloutDump,
    Sample,
    SamplingSpec,
    rank_store,
)
from rlhfkit.datamodules.prompts.curriculum import BySuccess
from rlhfkit.distributed import gather_objects

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)
BY_TOKENS = {
    "parts": [{"class_path": "rlhfkit.modules.parts.token_filters.TopEntropy", "init_args": {"fraction": 0.3}}],
    "advantages": "rlhfkit.modules.on_policy.presets.optimal_token_baseline",
}
LIMIT = 8.0
"""Seconds that a collective may take while the slow engine generates."""


class Slow(LocalEngine):
    """Takes longer on rank 1 than the limit of the process group."""

    def generate(self, *args: Any, **kwargs: Any) -> list[Sample]:
        set_limit(LIMIT)
        time.sleep(1.25 * LIMIT if RANK == 1 else 0.0)
        return super().generate(*args, **kwargs)


def set_limit(seconds: float) -> None:
    """Change the time limit of the process group."""
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def hanging(samples: Sequence[Sample]) -> list[float]:
    """A reward that does not return on the last rank."""
    if RANK == RANKS - 1:
        threading.Event().wait(60)
    return digits(samples)


def broken(samples: Sequence[Sample]) -> list[float]:
    """A reward that fails on the last rank, while the others are still scoring."""
    if RANK == RANKS - 1:
        raise ArithmeticError("no such reward")
    threading.Event().wait(60)
    return digits(samples)


class Relax(L.Callback):
    """Sets the usual limit again when training begins."""

    def on_train_batch_start(self, *_: Any) -> None:
        set_limit(120.0)


class Keep(L.Callback):
    """What every iteration was trained on, and which rank had what."""

    def __init__(self) -> None:
        self.iterations: list[Any] = []
        self.own: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        rollouts = RolloutCallback.of(trainer)
        samples = samples_of_all_ranks(rollouts)
        self.iterations.append(
            [(one.prompt.index, one.sample_index, one.token_ids.tolist(), one.reward) for one in samples]
        )
        self.own = [len(rollouts.samples), len(rollouts.experience), len(samples)]  # type: ignore[arg-type]


def fit(
    folder: Path, rollouts: RolloutCallback, *callbacks: L.Callback, epochs: int = 2, given: Any = None, **data: Any
) -> Any:
    keep = Keep()
    trainer, module, _ = fit_run(
        folder / f"rank{RANK}",  # ranks must not write the same model
        module=PlainGRPO,
        module_arguments={"lr": 0.05, "kl_coef": 0.01} | (given or {}),
        rollouts=rollouts,
        callbacks=[keep, *callbacks],
        **on_all_ranks(),
        max_epochs=epochs,
        accumulate_grad_batches=1,
        data_arguments={"rollout_batch_size": 6, "micro_batch_size": 12 // RANKS, **data},
    )
    return trainer, module, keep


def report(fitted: Any) -> dict[str, Any]:
    trainer, module, keep = fitted
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("time/")}
    sums = [float(tensor.double().abs().sum()) for tensor in weights(module).values()]
    return {"iterations": keep.iterations, "own": keep.own, "metrics": metrics, "weights": sums}


def failure(folder: Path, **arguments: Any) -> list[Any]:
    return [*raised(lambda: fit(folder, RolloutCallback(sampling=SAMPLING, **arguments), epochs=1))]


def runs(folder: Path) -> dict[str, Any]:
    """The runs that must be the same on any number of ranks."""
    dump = folder / f"dump_{RANKS}"
    plain = RolloutCallback(digits, sampling=SAMPLING)
    selected = RolloutCallback(only_odd, sampling=SAMPLING, parts=[DynamicSampling()])
    ordered = RolloutCallback(only_odd, sampling=SAMPLING)
    again = RolloutCallback(only_odd, sampling=SAMPLING, parts=[ReplayBuffer(capacity=3)])
    return {
        "plain": report(fit(folder, plain, Invariants(), RolloutDump(dump))),
        "selected": report(fit(folder, selected, Invariants())),
        # 40 prompts: those of the third iteration have been sampled before.
        "curriculum": report(
            fit(folder, ordered, epochs=3, curriculum=BySuccess(), rollout_batch_size=18, micro_batch_size=36 // RANKS)
        ),
        "replayed": report(fit(folder, again, epochs=3, given=BY_TOKENS)),
    }


def everything(folder: Path) -> dict[str, Any]:
    """All cases of this file."""
    found = runs(folder)
    slow = RolloutCallback(digits, engine=Slow(), sampling=SAMPLING)
    found["slow"] = report(fit(folder, slow, Relax(), epochs=1))
    found["hanging"] = failure(folder, reward=hanging, rollout_timeout=3.0)
    found["broken"] = failure(folder, reward=broken)
    gather_objects(None)  # rank 0 ends last
    return found


def killed(samples: Sequence[Sample]) -> list[float]:
    """Rank 1 is killed while it scores, and leaves no word."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return digits(samples)


def one_dies(folder: Path) -> dict[str, Any]:
    """A rank dies while the others wait for its samples."""
    rank_store.DEAD_AFTER_SECONDS, rank_store._GRACE_SECONDS = 10.0, 1.0
    return {"death": failure(folder, reward=killed)}
