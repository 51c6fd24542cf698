"""Step time of the DeepSpeed strategy, next to plain Lightning and to raw DeepSpeed; memory per rank by ZeRO stage.

    python benchmarks/strategy.py                       # about two minutes on two cores
    python benchmarks/strategy.py --hidden 512 --layers 8 --rounds 5

A random Llama of the asked size learns random tokens in fp32 on one rank. The variants run in turn, round by round, in
one process, so that a change of the load of the machine affects all of them:

- ``lightning``: Lightning's single-device strategy;
- ``deepspeed``: a bare loop over one DeepSpeed engine with the same configuration, no Trainer. The yardstick;
- ``rlhfkit``: ``RLHFDeepSpeedStrategy`` under the Trainer.

``seconds`` is the median time of an optimizer step, ``ratio`` the median over rounds of its ratio to the yardstick.
``memory_mb`` is the largest resident set of a rank while it trains a larger model on two ranks at each stage, less that
of the process before it had a model. Prints one line of JSON. Memory is read from /proc and needs Linux.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.deepspeed import rendezvous
from rlhfkit.strategies.deepspeed.engines import engine_config

VOCABULARY = 4096


class Model(L.LightningModule):
    """A causal language model with AdamW; notes the time of every step."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.policy = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=8,
                num_key_value_heads=8,
            )
        ).train()
        self.seconds: list[float] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Mean next-token loss."""
        return loss_of(self.policy, batch)

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        """Stop the clock."""
        self.seconds.append(time.perf_counter() - self.started)
        if index == 0:  # weights, gradients and optimizer exist now; what building them took does not count
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        self.peak = megabytes("VmHWM")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-4)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean next-token loss of (B, T) tokens."""
    logits = model(input_ids=batch).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def trainer(strategy: Any, ranks: int = 1) -> L.Trainer:
    """A trainer without extras."""
    return L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def fit(strategy: Any, options: argparse.Namespace) -> list[float]:
    """Seconds of each step under the Trainer."""
    model = Model(options.hidden, options.layers)
    trainer(strategy).fit(model, DataLoader(batches(options), batch_size=None))
    return model.seconds


def raw_deepspeed(options: argparse.Namespace) -> list[float]:
    """Seconds of each step in a bare loop."""
    import deepspeed

    model = Model(options.hidden, options.layers)
    config = engine_config(RLHFDeepSpeedStrategy(stage=options.stage).config or {}, {}, trainable=True)
    engine, *_ = deepspeed.initialize(
        model=model.policy, optimizer=model.configure_optimizers(), config=config, dist_init_required=False
    )
    seconds = []
    for batch in batches(options):
        started = time.perf_counter()
        engine.backward(loss_of(engine, batch))
        engine.step()
        seconds.append(time.perf_counter() - started)
    engine.destroy()
    return seconds


def batches(options: argparse.Namespace) -> list[Tensor]:
    """The same random tokens for every variant; the first step warms up."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.batch, options.tokens)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(options.steps + 1)]


def step_times(options: argparse.Namespace) -> dict[str, Any]:
    """Median step times of the three variants, in turn."""
    variants = {
        "rlhfkit": lambda: fit(RLHFDeepSpeedStrategy(stage=options.stage), options),
        "deepspeed": lambda: raw_deepspeed(options),
        "lightning": lambda: fit("auto", options),
    }
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, run in variants.items():
            rounds[name].append(statistics.median(run()[1:]))
    ratios = {
        name: statistics.median(a / b for a, b in zip(times, rounds["deepspeed"], strict=True))
        for name, times in rounds.items()
    }
    return {
        name: {"seconds": round(statistics.median(times), 4), "ratio": round(ratios[name], 3)}
        for name, times in rounds.items()
    }


def megabytes(field: str) -> float:
    """A line of /proc/self/status: ``VmRSS``, the resident set, or ``VmHWM``, its high-water mark. Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def memory_of_stages(options: argparse.Namespace) -> dict[str, float]:
    """Peak memory per rank on two ranks, a fresh pair of processes for each stage."""
    found = {}
    for stage in range(4):
        with socket.socket() as probe, tempfile.TemporaryDirectory() as extensions:
            probe.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "NODE_RANK": "0"}
            probe.close()
            command = [sys.executable, __file__, "--memory-of", str(stage)]
            command += ["--memory-hidden", str(options.memory_hidden), "--layers", str(options.layers)]
            processes = [
                subprocess.Popen(
                    command,
                    env=os.environ | shared | {"LOCAL_RANK": str(rank), "TORCH_EXTENSIONS_DIR": extensions},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                for rank in range(2)
            ]
            outputs = [process.communicate(timeout=300)[0] for process in processes]
        found[str(stage)] = round(max(float(output.splitlines()[-1]) for output in outputs), 1)
    return found


def memory_of(stage: int, options: argparse.Namespace) -> None:
    """One rank of the memory measurement; few tokens, so that weights and optimizer are what counts."""
    rendezvous.prepare_cpu()  # imports DeepSpeed, which is not to be counted
    options.batch, options.tokens, options.steps = 1, 8, 2
    model = Model(options.memory_hidden, options.layers)
    gc.collect()
    idle = megabytes("VmRSS") - sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    # DeepSpeed's buckets are made for models a thousand times larger; here they would be all that is measured.
    small = 2_000_000
    live = {f"stage3_{key}": small for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    strategy = RLHFDeepSpeedStrategy(
        stage=stage,
        reduce_bucket_size=small,
        allgather_bucket_size=small,
        engine_configs={"policy": {"zero_optimization": live}} if stage == 3 else None,
    )
    trainer(strategy, ranks=2).fit(model, DataLoader(batches(options), batch_size=None))
    print(model.peak - idle)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--memory-hidden", type=int, default=768, help="hidden size for the memory measurement")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=2, choices=range(4))
    parser.add_argument("--no-time", action="store_true", help="skip the step times")
    parser.add_argument("--no-memory", action="store_true", help="skip the part on two ranks")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of is not None:
        memory_of(options.memory_of, options)
        return
    rendezvous.prepare_cpu()
    millions = sum(p.numel() for p in Model(options.hidden, options.layers).parameters()) / 1e6
    result: dict[str, Any] = {
        "benchmark": "strategy",
        "million_parameters": round(millions, 1),
        "tokens_per_step": options.batch * options.tokens,
        "threads": torch.get_num_threads(),
        "stage": options.stage,
    }
    if not options.no_time:
        result["step"] = step_times(options)
    if not options.no_memory:
        result["memory_mb"] = memory_of_stages(options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
