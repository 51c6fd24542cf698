"""``Throughput``: the numbers by which people judge a run's speed, measured while it trains."""

import logging
import math
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks import RolloutCallback
from rlhfkit.costs.estimation import estimate_of, train_flops
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.run import GIB, GPU, GPUS
from rlhfkit.data.batch import PaddedBatch
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.modules import PolicyModule
from rlhfkit.trainer_parts import callbacks_of
from rlhfkit.validation import check_integer

log = logging.getLogger(__name__)

_RECENT = 10  # measurements of which the time left is estimated


class Throughput(Callback):
    """Logs how fast a run is, of all ranks, once an iteration (modules that learn from data: every n optimizer steps).

    ``rlhfkit fit`` adds it. What it logs, to every logger:

    * ``perf/trained_tokens_per_s``: tokens of prompts and answers in micro-batches, by the seconds of learning alone.
    * ``perf/generated_tokens_per_s``: tokens of the iteration's answers, by the seconds of generating alone.
    * ``perf/tokens_per_s``, ``perf/samples_per_s``: tokens of the iteration's answers and trained rows, by all seconds
      that pass.
    * ``perf/mfu``: model FLOPs utilization of learning (Chowdhery et al., 2022, arXiv:2204.02311, appendix B):
      operations of forward and backward passes through what is trained, nothing recomputed, by the GPUs' dense bfloat16
      rate (:data:`~rlhfkit.costs.GPUS`). Frozen models count as time and not as work, a shared prompt once for each of
      its answers. On a CPU, and on a GPU that is not in the table, ``perf/gflops_per_rank``: those operations a second.
    * ``perf/hidden_s``: seconds of sampling beside learning (:class:`~rlhfkit.Ahead`): those in which samples were
      made, without those that the trainer waited for them.
    * ``perf/hours_left``: until the last optimizer step, at the speed of the last ten measurements.
    * ``memory/collect_gib``, ``memory/learn_gib``: most that torch had allocated on a GPU while samples were collected
      and learned from, of the rank with most (not with :class:`~rlhfkit.callbacks.SharedDevices`, which logs them
      itself). On a CPU ``memory/process_gib``: most that a rank's process had since it began.
    * ``engine/running``, ``engine/waiting``, ``engine/kv_cache``: of vLLM's engines, as means over steps: requests that
      are computed, requests in the queue, and the most of the key-value cache that was in use (0 to 1).

    The bar shows hours left, tokens of answers a second, and MFU or GFLOP/s. Example::

        L.Trainer(callbacks=[rollouts, Throughput()])

    Args:
        every_n_steps: Optimizer steps of a measurement, for modules that learn from data.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(self, *, every_n_steps: int = 10) -> None:
        check_integer("every_n_steps", every_n_steps, minimum=1)
        self.every_n_steps = every_n_steps
        self._rollouts: RolloutCallback | None = None
        self._shapes: Mapping[str, ModelShape] = {}
        self._gpu: GPU | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # seconds and steps of measurements
        self._begin(0)

    def _begin(self, step: int) -> None:
        """Begin a measurement."""
        self._began, self._first_step = time.perf_counter(), step
        self._learning_since: float | None = None
        self._paused = 0.0  # seconds of validation
        self._tokens: Any = 0  # tensors on the device, so that nothing waits for it in between
        self._squares: Any = 0
        self._rows = 0
        self._memory: dict[str, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Describe what is trained; without a description operations are not counted."""
        if stage != "fit":
            return
        found = [one for one in callbacks_of(trainer) if isinstance(one, RolloutCallback)]
        self._rollouts = found[0] if found else None
        self._recent.clear()
        device = trainer.strategy.root_device
        cuda: Any = torch.cuda  # has no types
        self._gpu = gpu_named(str(cuda.get_device_name(device))) if device.type == "cuda" else None
        self._shapes = {}
        if isinstance(pl_module, PolicyModule):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                described = estimate_of(trainer, pl_module, GPU(name="any", memory=1.0, flops=1.0, bandwidth=1.0))
            self._shapes = {} if described is None else described.run.trained

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin to measure."""
        self._begin(trainer.global_step)
        self._reset_peak(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Learning begins with the first micro-batch."""
        if self._learning_since is not None:
            return
        if self._rollouts is not None:
            self._iteration = self._rollouts.iteration  # which it counts in the hook in which this measurement ends
            self._note_peak(trainer, "collect")
        self._learning_since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the tokens of a micro-batch, and log what was measured if enough was."""
        if isinstance(batch, PaddedBatch):
            lengths = batch.lengths
            self._tokens, self._squares = self._tokens + lengths.sum(), self._squares + lengths.square().sum()
            self._rows += len(batch)
        enough = self._rollouts is None and trainer.global_step - self._first_step >= self.every_n_steps
        if trainer.is_last_batch or enough:
            self._log(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop the clock."""
        self._stopped = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let it go on."""
        self._paused += time.perf_counter() - self._stopped

    # ------------------------------------------------------------------ a measurement

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log a measurement and begin the next one. A collective."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        everyone = run_on_all_ranks(lambda: self._measured(trainer))
        metrics, steps = rates(everyone), trainer.global_step - self._first_step
        metrics |= self._arithmetic(everyone)
        self._recent.append((max(one["whole"] for one in everyone), steps))
        left = trainer.estimated_stepping_batches - trainer.global_step
        seconds, done = (sum(each) for each in zip(*self._recent, strict=True))
        if math.isfinite(left) and done:
            metrics["perf/hours_left"] = max(left, 0.0) * seconds / done / 3600
        once = self._rollouts is not None  # an iteration; equal on all ranks, which sync_dist tells Lightning
        pl_module.log_dict(metrics, sync_dist=True, on_step=not once, on_epoch=once, batch_size=1)
        bar = {"perf/mfu": "mfu", "perf/gflops_per_rank": "GFLOP/s", "perf/hours_left": "hours left"}
        bar |= {"perf/tokens_per_s": "tokens/s"}
        for name, short in bar.items():
            if name in metrics:
                pl_module.log(short, metrics[name], prog_bar=True, logger=False, sync_dist=True, batch_size=1)
        self._begin(trainer.global_step)
        self._reset_peak(trainer)

    def _measured(self, trainer: L.Trainer) -> dict[str, float]:
        """What this rank has measured: seconds, tokens, rows, and metrics that are not added up."""
        self._note_peak(trainer, "learn")
        now = time.perf_counter()
        begun = now if self._learning_since is None else self._learning_since
        found = {
            "whole": now - self._began - self._paused,
            "learn": now - begun - self._paused,
            "tokens": float(self._tokens),
            "squares": float(self._squares),
            "rows": float(self._rows),
            **self._memory,
        }
        rollouts = self._rollouts
        if rollouts is None:
            return found
        seconds = rollouts.timing.metrics(self._iteration)
        found["generated"] = float(sum(sample.num_tokens for sample in rollouts.samples))
        found |= {name: seconds.get(f"time/{name}", 0.0) for name in ("generate", "score", "wait")}
        return found | dict(rollouts.engine.load_metrics())

    def _arithmetic(self, everyone: list[dict[str, float]]) -> dict[str, float]:
        """Operations of forward and backward passes a second."""
        tokens, seconds = sum(one["tokens"] for one in everyone), max(one["learn"] for one in everyone)
        if not (self._shapes and tokens and seconds > 0):
            return {}
        length = sum(one["squares"] for one in everyone) / tokens  # of the sequence that a token is in
        work = sum(train_flops(shape, tokens, length, gradient_checkpointing=False) for shape in self._shapes.values())
        rate = work / seconds / len(everyone)
        return {"perf/gflops_per_rank": rate / 1e9} if self._gpu is None else {"perf/mfu": rate / self._gpu.flops}

    # ------------------------------------------------------------------ memory

    def _measures_gpu(self, trainer: L.Trainer) -> bool:
        shared = sys.modules.get("rlhfkit.callbacks.rollout.parts.shared_devices")
        taken = shared is not None and self._rollouts is not None and self._rollouts.part(shared.SharedDevices)
        return trainer.strategy.root_device.type == "cuda" and not taken

    def _reset_peak(self, trainer: L.Trainer) -> None:
        if self._measures_gpu(trainer):
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    def _note_peak(self, trainer: L.Trainer, phase: str) -> None:
        """Note the most that was allocated since the last call."""
        if self._measures_gpu(trainer):
            peak = torch.cuda.max_memory_allocated(trainer.strategy.root_device)
            self._memory[f"memory/{phase}_gib"] = peak / GIB
            self._reset_peak(trainer)
        elif trainer.strategy.root_device.type == "cpu" and sys.platform == "linux":
            import resource

            self._memory["memory/process_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def rates(everyone: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of what the ranks have measured: work is added up, seconds are those of the slowest."""

    def total(name: str) -> float:
        return sum(one.get(name, 0.0) for one in everyone)

    def slowest(name: str) -> float:
        return max(one.get(name, 0.0) for one in everyone)

    metrics = {}
    for name, work, seconds in (
        ("trained_tokens", "tokens", "learn"),
        ("generated_tokens", "generated", "generate"),
        ("tokens", "generated", "whole"),
        ("samples", "rows", "whole"),
    ):
        if total(work) and slowest(seconds) > 0:
            metrics[f"perf/{name}_per_s"] = total(work) / slowest(seconds)
    if slowest("wait"):
        metrics["perf/hidden_s"] = max(slowest("generate") + slowest("score") - slowest("wait"), 0.0)
    names = dict.fromkeys(name for one in everyone for name in one if name.startswith(("memory/", "engine/")))
    return metrics | {name: slowest(name) for name in names}


def gpu_named(device: str) -> GPU | None:
    """The GPU of :data:`GPUS` that a driver calls so, as ``NVIDIA H100 80GB HBM3``; ``None``: it is not there."""

    def is_meant(name: str) -> bool:
        return all(re.search(rf"\b{word}\b", device, re.IGNORECASE) for word in name.split("-"))

    return max((gpu for name, gpu in GPUS.items() if is_meant(name)), key=lambda gpu: len(gpu.name), default=None)
