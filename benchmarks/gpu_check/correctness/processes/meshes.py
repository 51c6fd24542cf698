"""Two ranks that compute forward passes together, over NCCL on GPUs, against one: sequence, ring and tensor ranks."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import Figure, Setting, SkippedError, check
from benchmarks.gpu_check.compare import distance
from benchmarks.gpu_check.models import tiny_config, tiny_model

ROOT = Path(__file__).parents[4]
MESHES: dict[str, dict[str, Any]] = {
    "sequence ranks": {"sequence_parallel_size": 2},
    "ring": {"sequence_parallel_size": 2, "sequence_parallel": "ring"},
    "tensor ranks": {"tensor_parallel_size": 2},
}
BOUND = 1e-3
"""Distance of what the weights have moved, relative in norm."""


def save_model(folder: Path) -> None:
    """A model whose heads, of queries and of keys, two ranks can divide."""
    from transformers import AutoModelForCausalLM

    tiny_model(folder)
    torch.manual_seed(0)
    config = tiny_config(heads=4, hidden=128)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def train(setting: Setting, folder: Path, strategy: Any, devices: int) -> Any:
    """Steps of supervised training, each on the same rows, which the ranks share; what each weight has moved."""
    from benchmarks.gpu_check.correctness.deepspeed import moved
    from benchmarks.gpu_check.runs import Answers, Published, trainer, with_sgd
    from rlhfkit import SFTModule

    published = Published()
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "callbacks": [published]}
    run = trainer(setting, folder, strategy=strategy, devices=devices, use_distributed_sampler=False, **options)
    run.fit(with_sgd(SFTModule)(str(folder / "model"), lr=0.05), Answers("tokens"))
    return moved(published)


def member() -> None:
    """A rank of two; its arguments are the device and the folder, to which rank 0 writes what each weight has moved."""
    import deepspeed

    from rlhfkit import RLHFDeepSpeedStrategy

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for a minute
    setting, folder = Setting(sys.argv[1], quick=True), Path(sys.argv[2])
    torch.set_num_threads(1)
    for name, sizes in MESHES.items():
        found = train(setting, folder, RLHFDeepSpeedStrategy(stage=2, **sizes), 2)
        if os.environ["LOCAL_RANK"] == "0":
            torch.save(found, folder / f"{name}.pt")
        os.environ["WORLD_SIZE"] = "2"  # Lightning deletes it when a fit ends


@check("parallel/meshes", seconds=150, packages=("deepspeed",), process="meshes", simulated=False)
def meshes(setting: Setting) -> Iterator[Figure]:
    """Over gloo on a CPU; a rank needs a GPU of its own."""
    if setting.on_gpu and torch.cuda.device_count() < 2:
        raise SkippedError("needs 2 GPUs, here is 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder / "model")
        alone = train(setting, folder, "auto", 1)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0"}
        code = "from benchmarks.gpu_check.correctness.processes.meshes import member; member()"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, setting.device, str(folder)],
                cwd=ROOT,
                env=os.environ | common | {"LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=140)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        print(*said, sep="\n")
        for number, rank in enumerate(ranks):
            last = (said[number].strip().splitlines() or ["no output"])[-1]
            if rank.returncode:
                raise RuntimeError(f"rank {number} ended with status {rank.returncode}: {last}"[:300])
        for case in MESHES:
            found = torch.load(folder / f"{case}.pt")
            yield Figure(f"{case}: what the weights have moved", distance(found, alone), BOUND)
