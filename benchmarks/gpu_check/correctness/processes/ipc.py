"""Handles to GPU memory between two processes on one GPU, as colocated engines get weights; without vLLM."""

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import Figure, Setting, check

IN_A_CHILD = "from benchmarks.gpu_check.correctness.processes.ipc import {0}; {0}()"
ROOT = Path(__file__).parents[4]


def read_handles() -> None:
    """The other process: open each handle that it is given, say the sum of its bytes, and close it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    rebuild: Any = rebuild_cuda_tensor  # has no types
    torch.cuda.init()
    for line in sys.stdin.buffer:
        tensor = rebuild(*pickle.loads(bytes.fromhex(line.decode().strip())))
        print(float(tensor.sum(dtype=torch.float64)), flush=True)
        del tensor
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        print("closed", flush=True)


class Child:
    """A process on the same GPU that opens handles."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_A_CHILD.format("read_handles")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def sum_of(self, tensor: Any) -> float:
        """What the child sees; it has closed the handle when this returns."""
        from torch.multiprocessing.reductions import reduce_tensor

        reduce: Any = reduce_tensor  # has no types
        assert self._process.stdin is not None
        self._process.stdin.write(pickle.dumps(reduce(tensor)[1]).hex().encode() + b"\n")
        self._process.stdin.flush()
        found = float(self._line())
        assert self._line() == "closed"
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError(f"the other process ended with status {self._process.wait()}")
        return line

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def free_gib() -> float:
    """Free memory of the GPU."""
    return torch.cuda.mem_get_info()[0] / 2**30


@check("ipc/two_processes", seconds=90, gpus=1)
def two_processes(setting: Setting) -> Iterator[Figure]:
    """A child reads buffers of this process; the memory is free again after ``ipc_collect`` and ``empty_cache``."""
    size = setting.size(2**30, 2**24)
    child = Child()
    try:
        small = torch.ones(1000, device="cuda")
        child.sum_of(small)  # CUDA is up on both sides
        gc.collect()
        torch.cuda.empty_cache()
        before = free_gib()
        for value in (1, 2):  # the same buffer holds one chunk after another
            buffer = torch.full((size,), value, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            seen = child.sum_of(buffer)
            yield Figure(f"chunk {value}: the child's sum is wrong by", abs(seen - value * size), 0)
            del buffer
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        yield Figure("memory that is not free again", before - free_gib(), 0.1, "GiB")
    finally:
        child.close()


def share_expandable() -> None:
    """A process, with the variables of its environment, that shares a buffer with a child."""
    from rlhfkit.rollout.weight_sync.cuda_ipc import without_expandable_segments

    child = Child()
    try:
        expandable = torch.ones(2**24, device="cuda")  # freed, and not to be given away again
        del expandable
        with without_expandable_segments():
            tensor = torch.ones(2**24, device="cuda")
        torch.cuda.synchronize()
        print("SUM", child.sum_of(tensor))
    finally:
        child.close()


@check("ipc/expandable_segments", seconds=90, gpus=1)
def expandable_segments(setting: Setting) -> Iterator[Figure]:
    """Handles to a buffer as ranks allocate it, with ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""
    option = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD.format("share_expandable")],
        env=os.environ | option,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    right = f"SUM {2**24:.1f}" in done.stdout
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    yield Figure("handles beside expandable segments", "work" if right else f"do not work: {last}"[:200])
    yield Figure("the child's sum is wrong", float(not right), 0)
