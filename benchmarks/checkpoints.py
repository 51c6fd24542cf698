"""What checkpoints cost: bytes read per rank, hashing, the time that a save stops training, conversion for other ranks.

    python benchmarks/checkpoints.py                    # about a minute on two cores
    python benchmarks/checkpoints.py --hidden 1024 --layers 8

A random Llama trains one step with AdamW under ``RLHFDeepSpeedStrategy`` (ZeRO 2, fp32, one rank). Every comparison is
of the same bytes, in turn:

- ``read_gb``: what a rank reads to verify a checkpoint of 64 ranks, before (rank 0 read everything) and after (the
  largest share), from a manifest with the sizes of ZeRO 3 files; counted, not read.
- ``hashing_gb_per_second``: SHA-256 of the checkpoint's files with one thread, and with one per processor.
- ``save_seconds``: how long ``trainer.save_checkpoint`` stops training, blocking and with ``async_save``; ``ratio`` is
  the median of their ratio. ``snapshot_gb`` is the memory that the latter takes until the files are written.
- ``convert_seconds``: a checkpoint of two ranks converted for another number of ranks by one process and by two. The
  processes share the machine's cores; on one core nothing is gained.

Prints one line of JSON.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.checkpoint.directory import read_manifest
from rlhfkit.strategies.checkpoint.hashing import changed_chunks, share_of_rank
from rlhfkit.strategies.checkpoint.universal import converted

VOCABULARY = 4096


class Model(L.LightningModule):
    """A causal language model with AdamW."""

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
        )

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        """Next-token loss."""
        loss: Tensor = self.policy(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-4)


class Saves(L.Callback):
    """Saves after every step, in turn blocking and in the background, and notes how long it took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, list[float]] = {"blocking": [], "background": []}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        """Both ways, one after the other."""
        strategy: Any = trainer.strategy
        for name in self.seconds:
            strategy.async_save = name == "background"
            started = time.perf_counter()
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")
            self.seconds[name].append(time.perf_counter() - started)
            strategy.wait_for_saves()


def trainer(ranks: int, callbacks: list[L.Callback], batches: int) -> L.Trainer:
    """A quiet one."""
    return L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=RLHFDeepSpeedStrategy(2),
        max_steps=batches,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def loader(batches: int) -> DataLoader[Tensor]:
    """Random tokens."""
    return DataLoader(torch.randint(0, VOCABULARY, (batches, 32)), batch_size=1)


def hashing(path: Path) -> dict[str, float]:
    """GB/s of verifying a checkpoint."""
    share, speeds = share_of_rank(read_manifest(path), 0, 1), {}
    for name, threads in {"one thread": 1, "all processors": os.cpu_count() or 1}.items():
        started = time.perf_counter()
        assert not changed_chunks(path, share, threads=threads)
        speeds[name] = sum(chunk.length for chunk in share) / (time.perf_counter() - started) / 1e9
    return speeds


def bytes_read(parameters: float = 70e9, ranks: int = 64) -> dict[str, float]:
    """GB that the busiest rank reads to verify: 12 bytes of optimizer and 2 of weights per parameter at ZeRO 3."""
    sizes = {
        **{f"policy/checkpoint/zero_pp_rank_{r}_mp_rank_00_optim_states.pt": 12 for r in range(ranks)},
        **{f"policy/checkpoint/zero_pp_rank_{r}_mp_rank_00_model_states.pt": 2 for r in range(ranks)},
    }
    chunk_bytes, files = 64 * 2**20, {}
    for name, per_parameter in sizes.items():
        size = int(per_parameter * parameters / ranks)
        files[name] = {"size": size, "sha256": [""] * -(-size // chunk_bytes)}
    manifest = {"world_size": ranks, "chunk_bytes": chunk_bytes, "files": files}
    share = max(sum(chunk.length for chunk in share_of_rank(manifest, rank, ranks)) for rank in range(ranks))
    return {"before": sum(record["size"] for record in files.values()) / 1e9, "after": share / 1e9}


def on_rank(rank: int, ranks: int, port: int, path: Path, task: str, results: Any, size: tuple[int, int]) -> None:
    """One process: train one step on several ranks and save, or convert."""
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    if task == "save":
        run = trainer(ranks, [], 1)

        class SaveOnce(L.Callback):
            def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
                trainer.save_checkpoint(path)

        run.callbacks.append(SaveOnce())
        run.fit(Model(*size), loader(2))
        return
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    manifest = read_manifest(path)
    torch.distributed.barrier()
    started = time.perf_counter()
    with converted(path, ["policy"], manifest, timeout=600):
        results.put(time.perf_counter() - started)


def spawn(ranks: int, path: Path, task: str, size: tuple[int, int]) -> float:
    """Run a task on processes of their own; the longest time that one of them reports."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=on_rank, args=(rank, ranks, port, path, task, results, size)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0, f"{task} failed"
    return 0.0 if task == "save" else max(results.get() for _ in processes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.hidden, options.layers
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saves = Saves(folder)
        run = trainer(1, [saves], options.rounds)
        run.fit(Model(*size), loader(options.rounds))
        strategy: Any = run.strategy
        ratios = [later / now for now, later in zip(*saves.seconds.values(), strict=True)]
        speeds = hashing(folder / "background.ckpt")
        spawn(2, folder / "two.ckpt", "save", size)
        convert = {ranks: spawn(ranks, folder / "two.ckpt", "convert", size) for ranks in (1, 2)}
        report = {
            "read_gb": bytes_read(),
            "hashing_gb_per_second": speeds,
            "save_seconds": {way: statistics.median(seconds) for way, seconds in saves.seconds.items()},
            "save_ratio": statistics.median(ratios),
            "snapshot_gb": strategy.snapshot_bytes / 1e9,
            "convert_seconds": convert,
            "convert_ratio": convert[2] / convert[1],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
