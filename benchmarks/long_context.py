"""Tokens of one row that fit in a fixed memory: with 1, 2 and 4 sequence ranks, Ulysses and ring.

    python benchmarks/long_context.py                       # about ten minutes on two cores
    python benchmarks/long_context.py --sizes 1 2 --kinds ulysses deepspeed
    python benchmarks/long_context.py --sizes 2 --kinds ulysses ring --base 1024

Each run of ours is an ``SFTModule`` under ``RLHFDeepSpeedStrategy(stage=3, sequence_parallel_size=...)`` with gradient
checkpointing and tiled MLPs, on gloo ranks that are processes of their own, training on one row. ``deepspeed`` is
DeepSpeed's own Ulysses (``UlyssesSPAttentionHF``) with the same model, checkpointing and output layer, without a
Trainer, at ZeRO 3 too. For three lengths of the row, in optimizer steps after the first, are measured

- the largest resident memory of a rank over what is resident before the step (Linux only);
- the seconds of the fastest step of the longest row;
- the bytes that a rank gives to collectives and messages of its own.

Memory and traffic are lines over the length: their slopes are what a token takes, and where memory's line reaches
``--megabytes`` is how many tokens fit. ZeRO's part does not depend on the length.

Prints one line of JSON: for each kind and number of ranks bytes and traffic per token, tokens that fit, how many times
those of one rank, and seconds.
"""

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

KINDS = ("ulysses", "ring", "deepspeed")
BASE = int(os.environ.get("RLHFKIT_BENCHMARK_BASE", "2048"))
"""Tokens of the shortest row on one rank; also of one rank's part of it on several (``--base``)."""
TILE = 1024
ALLOCATOR = {  # freed tensors leave the resident memory at once
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}


def lengths_of(size: int) -> list[int]:
    """Tokens of the rows that are trained on with ``size`` sequence ranks."""
    return [BASE * factor for factor in {1: (1, 2, 3), 2: (2, 4, 6), 4: (4, 6, 8)}.get(size, (size, 2 * size))]


def save_model(folder: Path) -> None:
    """A Llama of four layers, random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# ------------------------------------------------------------------------------------------------ measuring a rank


class Meter:
    """Resident memory, seconds and traffic of this process."""

    def __init__(self) -> None:
        self.sent = 0
        self.rows: list[dict[str, float]] = []
        self._count_traffic()

    def _count_traffic(self) -> None:
        """Count the bytes given to collectives and messages, by wrapping those of ``torch.distributed``."""
        import torch
        import torch.distributed as dist

        def wrapped(name: str, sent: Callable[..., Any]) -> None:
            inner = getattr(dist, name)

            def count(*args: Any, **kwargs: Any) -> Any:
                found = sent(*args, **kwargs)
                self.sent += sum(t.numel() * t.element_size() for t in found if torch.is_tensor(t))
                return inner(*args, **kwargs)

            setattr(dist, name, count)

        wrapped("all_to_all_single", lambda output, given=None, *a, **k: [k.get("input", given)])
        wrapped("all_to_all", lambda outputs, inputs, *a, **k: inputs)
        wrapped("all_reduce", lambda tensor, *a, **k: [tensor, tensor])
        # P2POp refuses wrapped functions, so isend itself stays as it is.
        wrapped("batch_isend_irecv", lambda ops: [op.tensor for op in ops if "send" in op.op.__name__])
        wrapped("send", lambda tensor, *a, **k: [tensor])

    def start(self) -> None:
        """Before a step."""
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
        self._before, self._sent, self._started = self._status("VmRSS"), self.sent, time.perf_counter()

    def stop(self, length: int) -> None:
        """After a step."""
        self.rows.append(
            {
                "length": length,
                "bytes": self._status("VmHWM") - self._before,
                "sent": self.sent - self._sent,
                "seconds": time.perf_counter() - self._started,
            }
        )

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def train_ours(folder: str, kind: str, size: int) -> list[dict[str, float]]:
    """Train on rows of several lengths, each twice, in this process, one of ``size`` ranks."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from rlhfkit import RLHFDeepSpeedStrategy, SFTModule
    from rlhfkit.data.batch import TokenBatch
    from rlhfkit.strategies.deepspeed import rendezvous

    rendezvous.prepare_cpu()

    def row(length: int) -> TokenBatch:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(2, 4096, (1, length), generator=generator)
        mask = torch.ones(1, length - 1, dtype=torch.bool)
        return TokenBatch(input_ids=ids, attention_mask=torch.ones_like(ids).bool(), loss_mask=mask)

    class Measure(L.Callback):
        meter = Meter()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.meter.start()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.meter.stop(batches[batch_idx])

    # The first step allocates the optimizer's states. Rank 0 brings the row, the others a row without targets.
    batches = [16, *(length for length in lengths_of(size) for _ in range(2))]
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    data = [row(length) if first else row(2).without_targets() for length in batches]
    more = {"sequence_parallel_size": size, "sequence_parallel": kind} if size > 1 else {}
    live = {f"stage3_{key}": 1_000_000 for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")}
    strategy = RLHFDeepSpeedStrategy(
        stage=3,
        reduce_bucket_size=1_000_000,
        allgather_bucket_size=1_000_000,
        engine_configs={"policy": {"zero_optimization": live}},
        **more,
    )
    module = SFTModule(folder, gradient_checkpointing=True, tiled_mlp=TILE)
    module.row_problems = lambda batch: []  # type: ignore[method-assign]  # a forward pass of its own
    measure = Measure()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        max_epochs=1,
        callbacks=[measure],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=None))
    return measure.meter.rows[1:]


def train_deepspeed(folder: str, kind: str, size: int) -> list[dict[str, float]]:
    """The same with DeepSpeed's Ulysses."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import LlamaForCausalLM

    from rlhfkit.losses import linear_logprobs
    from rlhfkit.models.activation_memory import save_activation_memory
    from rlhfkit.models.forward import replaced_head

    deepspeed.init_distributed("gloo", verbose=False)
    model: Any = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    save_activation_memory(model, True, False, TILE)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=size, micro_batch_size=1,
        seq_length_is_variable=True,
    )  # fmt: skip
    zero = {"stage": 3, "reduce_bucket_size": 1_000_000, "reduce_scatter": False} | {
        f"stage3_{key}": 1_000_000 for key in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "seq_parallel_communication_data_type": "fp32",
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    engine, *_ = deepspeed.initialize(model=model, mpu=mpu, optimizer=optimizer, config=config)
    meter, rank = Meter(), dist.get_rank()
    for length in [16 * size, *(length for length in lengths_of(size) for _ in range(2))]:
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(2, 4096, (1, length), generator=generator)
        own = slice(length // size * rank, length // size * (rank + 1))
        targets, positions = torch.roll(ids, -1, 1)[0, own], torch.arange(length)[None, own]

        def head(hidden: torch.Tensor, targets: torch.Tensor = targets) -> torch.Tensor:
            return linear_logprobs(hidden[0], model.lm_head.weight, targets).logprobs.sum()[None, None]

        meter.start()
        with replaced_head(model, head):
            loss = -engine(input_ids=ids[:, own], position_ids=positions, use_cache=False).logits.sum() / length
        engine.backward(loss)
        engine.step()
        meter.stop(length)
    return meter.rows[1:]


# ------------------------------------------------------------------------------------------------ running all


def run(folder: str, kind: str, size: int) -> list[list[dict[str, float]]]:
    """The measurements of each of ``size`` ranks, each a fresh process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    processes = []
    for rank in range(size):
        own = {"LOCAL_RANK": str(rank), "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", json.dumps([folder, kind, size])]
        environment = os.environ | ALLOCATOR | shared | own
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True))
    found = []
    try:
        for process in processes:
            output, complaint = process.communicate(timeout=900)
            if process.returncode:
                raise RuntimeError(f"{kind} on {size} rank(s): {complaint[-3000:]}")
            found.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of the line through points, by least squares."""
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    slope = above / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def summary(found: list[list[dict[str, float]]], megabytes: float) -> dict[str, float]:
    """Of the rank that needs most memory, and sends most."""

    def largest(key: str) -> list[tuple[float, float]]:
        lengths = sorted({row["length"] for rows in found for row in rows})
        return [(at, max(row[key] for rows in found for row in rows if row["length"] == at)) for at in lengths]

    constant, per_token = line(largest("bytes"))
    longest = max(row["length"] for row in found[0])
    seconds = min(row["seconds"] for row in found[0] if row["length"] == longest)
    return {
        "megabytes": [[int(length), round(size / 1e6, 1)] for length, size in largest("bytes")],  # type: ignore[dict-item]
        "bytes_per_token": round(per_token),
        "tokens_that_fit": int((megabytes * 1e6 - constant) / per_token),
        "sent_per_token": round(line(largest("sent"))[1]),
        "longest_row": int(longest),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="numbers of sequence ranks")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--megabytes", type=float, default=512, help="memory of a rank for activations")
    parser.add_argument("--base", type=int, default=BASE, help="tokens of the shortest row on one rank")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["RLHFKIT_BENCHMARK_BASE"] = str(options.base)  # of the ranks
    if options.rank:
        folder, kind, size = json.loads(options.rank)
        train = train_deepspeed if kind == "deepspeed" else train_ours
        print(json.dumps(train(folder, kind, size)))
        return
    result: dict[str, Any] = {"benchmark": "long_context", "megabytes": options.megabytes, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        for kind in options.kinds:
            for size in options.sizes:
                if size == 1 and kind == "ring":
                    continue  # one rank is one rank
                name = "one rank" if size == 1 and kind == "ulysses" else f"{kind} {size}"
                result["runs"][name] = summary(run(folder, kind, size), options.megabytes)
                alone = result["runs"].get("deepspeed 1" if kind == "deepspeed" else "one rank")
                if alone is not None:
                    times = result["runs"][name]["tokens_that_fit"] / alone["tokens_that_fit"]
                    result["runs"][name]["times_one_rank"] = round(times, 2)
                print(name, result["runs"][name], file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
