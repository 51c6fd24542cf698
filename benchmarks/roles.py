"""What a reference and a reward model cost an iteration of GRPO: none, as children of the module, and in Ray actors.

The engine takes its time without these cores, as a remote one does: each answer sleeps for so many milliseconds a token
in one of ``--slots`` slots, so groups finish one after another, and tokens are random. Everything else is real: the
policy's update, the packed forward passes of reference and reward model, ``ModelPool`` and Ray. The engine is the
bottleneck by construction (``--milliseconds``); on two cores rank, reference and reward model share what it leaves.

    python benchmarks/roles.py          # a minute on two cores

``seconds`` is the median of an iteration, the first left out; ``extra`` is the share by which it exceeds that without
either model; ``waited`` are a rank's seconds per iteration for the pools' numbers. Prints one JSON line.
"""

import argparse
import itertools
import json
import logging
import math
import os
import queue
import random
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import torch
from rl import VOCABULARY, WORDS, make_model

from rlhfkit import (
    GRPOModule,
    ModelPool,
    Prompt,
    PromptDataModule,
    RolloutCallback,
    RolloutEngine,
    Sample,
    SamplingSpec,
)
from rlhfkit.models import load_scalar_model, load_tokenizer
from rlhfkit.rollout.engine import WeightSource, sample_seed


class SleepingEngine(RolloutEngine):
    """Slots that sleep for each token of an answer, and return random ones."""

    can_score = False  # there is no model
    can_stream = True

    def __init__(self, slots: int, milliseconds: float) -> None:
        self.seconds = milliseconds / 1000
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(slots):
            threading.Thread(target=self._slot, daemon=True).start()

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Nothing is started."""
        self.version = 0 if load_weights else None

    def load(self, weights: WeightSource, version: int) -> None:
        """Read the weights to their end, and forget them."""
        for _name, _tensor in weights:
            pass
        self.version = version

    def _slot(self) -> None:
        while True:
            stream, prompt, index, iteration, sampling = self.requests.get()
            draw = random.Random(sample_seed(sampling.seed, iteration, prompt.index, index))
            length = round(sampling.max_new_tokens * draw.uniform(0.3, 1.0))
            time.sleep(self.seconds * length)
            ids = [draw.randrange(2, VOCABULARY) for _ in range(length)]
            numbers = [-math.log(VOCABULARY)] * length
            stream.finish(Sample(prompt, index, ids, numbers, [self.version or 0] * length, "length"))

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "SleepingStream":
        """Groups as they are finished."""
        return SleepingStream(self, sampling, iteration)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """All groups, in order."""
        stream, groups = self.stream(sampling, iteration=iteration), {}
        stream.submit(prompts)
        while len(groups) < len(prompts):
            groups |= {group[0].prompt.index: group for group in stream.collect(len(prompts))}
        return [sample for prompt in prompts for sample in groups[prompt.index]]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """There is no model."""
        raise RuntimeError("SleepingEngine has no model")


class SleepingStream:
    """Requests of an iteration."""

    def __init__(self, engine: SleepingEngine, sampling: SamplingSpec, iteration: int) -> None:
        self.engine, self.sampling, self.iteration = engine, sampling, iteration
        self.groups: dict[int, list[Sample]] = {}
        self.finished: queue.SimpleQueue[list[Sample]] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        """Queue the group of each prompt."""
        for prompt, index in itertools.product(prompts, range(self.sampling.group_size)):
            self.engine.requests.put((self, prompt, index, self.iteration, self.sampling))

    def finish(self, sample: Sample) -> None:
        """Called by a slot."""
        with self.lock:
            group = self.groups.setdefault(sample.prompt.index, [])
            group.append(sample)
            if len(group) == self.sampling.group_size:
                self.finished.put(sorted(group, key=lambda one: one.sample_index))

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        """A finished group, if there is one in time."""
        try:
            return [self.finished.get(timeout=wait)]
        except queue.Empty:
            return []

    def close(self) -> None:
        """Nothing is dropped."""


class Clock(L.Callback):
    """When iterations end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times.append(time.perf_counter())


def by_rule(samples: Sequence[Sample]) -> list[float]:
    """A reward that costs nothing."""
    return [float(sample.token_ids[0] % 7) for sample in samples]


def measure(folder: Path, variant: str, options: argparse.Namespace) -> dict[str, float]:
    """A run with both models nowhere, as children, or placed."""
    model, reward = str(folder / "model"), str(folder / "reward")
    pools = {"reference": ModelPool(model), "reward_model": ModelPool(reward)} if variant == "placed" else {}
    arguments: dict[str, Any] = {"kl_coef": 0.0 if variant == "none" else 0.01}
    arguments |= {"children": {"reward_model": reward}}.get(variant, pools)
    module = GRPOModule(model, lr=1e-5, **arguments)
    data = PromptDataModule(
        str(folder / "prompts.jsonl"), rollout_batch_size=options.prompts, micro_batch_size=options.micro_batch
    )
    rollouts = RolloutCallback(
        by_rule if variant == "none" else None,
        engine=SleepingEngine(options.slots, options.milliseconds),
        sampling=SamplingSpec(group_size=options.group, max_new_tokens=options.tokens),
        alarms=[],
    )
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=options.iterations + 1, callbacks=[rollouts, clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, data)
    seconds = [last - first for first, last in itertools.pairwise(clock.times)]
    found = {"seconds": statistics.median(seconds)}
    if pools:
        found["waited"] = sum(pool.waited for pool in pools.values()) / (options.iterations + 1)
    return found


def main() -> None:
    """Measure the variants in turns, and print medians over the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"prompts": 16, "group": 4, "micro_batch": 32, "tokens": 96, "slots": 16}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--milliseconds", type=float, default=8.0, help="of a token of an answer")
    parser.add_argument("--iterations", type=int, default=5, help="of each run that count")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "rlhfkit"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "model", 128, 2)
        load_scalar_model(str(folder / "model"), head_std=0.1).save_pretrained(folder / "reward")
        load_tokenizer(str(folder / "model")).save_pretrained(folder / "reward")
        rows = [json.dumps({"prompt": " ".join(WORDS[place : place + 16])}) for place in range(200)]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        runs: dict[str, list[dict[str, float]]] = {"none": [], "children": [], "placed": []}
        for _ in range(options.rounds):
            for variant, found in runs.items():
                found.append(measure(folder, variant, options))
    report: dict[str, Any] = {"benchmark": "roles", **vars(options)}
    medians = {name: statistics.median(one["seconds"] for one in found) for name, found in runs.items()}
    for name, seconds in medians.items():
        report[name] = {"seconds": round(seconds, 3), "extra": round(seconds / medians["none"] - 1, 4)}
    report["placed"]["waited"] = round(statistics.median(one["waited"] for one in runs["placed"]), 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
