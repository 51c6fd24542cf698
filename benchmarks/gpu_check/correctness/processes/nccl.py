"""NCCL as far as one GPU shows it: a group of one, its end, two processes on one GPU, a peer that never comes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_check.check import Figure, Setting, check

ROOT = Path(__file__).parents[4]


@check("nccl/one_rank", seconds=90, gpus=1, process="nccl")
def one_rank(setting: Setting) -> Iterator[Figure]:
    """Collectives, the end of a group, and a second group after it."""
    for number in (1, 2):
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
        values = torch.arange(1000.0, device="cuda")
        dist.broadcast(values, 0)
        dist.all_reduce(values)
        yield Figure(f"group {number}: sum is wrong by", abs(float(values.sum()) - 499500), 0)
        start = time.perf_counter()
        dist.destroy_process_group()
        yield Figure(f"group {number}: end", time.perf_counter() - start, 20.0, "s")


@check("nccl/streams", seconds=60, gpus=1, process="nccl")
def streams(setting: Setting) -> Iterator[Figure]:
    """A group for weights leaves the current stream and torch's default group as they were."""
    from torch._C._distributed_c10d import PrefixStore

    from rlhfkit.rollout.weight_sync.process_group.groups import NcclGroup

    before = torch.cuda.current_stream()
    group = NcclGroup(PrefixStore("a", dist.HashStore()), "weights", 0, 1, 30.0, torch.device("cuda", 0))
    group.connect()
    block = torch.arange(100, dtype=torch.uint8, device="cuda")
    broadcast = group.broadcast(block)
    deadline = time.monotonic() + 10
    while not broadcast.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    broadcast.wait()
    start = time.perf_counter()
    group.close()
    yield Figure("seconds to abort", time.perf_counter() - start, 15.0, "s")
    yield Figure("bytes that differ", int((block.cpu() != torch.arange(100)).sum()), 0)
    yield Figure("another current stream", float(torch.cuda.current_stream() != before), 0)
    yield Figure("a default process group", float(dist.is_initialized()), 0)


def join() -> None:
    """A rank of a group of two; its arguments are rank, port of the store, time limit and GPU."""
    from torch._C._distributed_c10d import TCPStore

    from rlhfkit.rollout.weight_sync.process_group.groups import NcclGroup
    from rlhfkit.rollout.weight_sync.process_group.waiting import call_with_limit

    rank, port, limit, device = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=limit))
    try:
        group = NcclGroup(store, "weights", rank, 2, limit, torch.device("cuda", device))
        call_with_limit(group.connect, lambda: None, limit, lambda: "the peer did not come")
        print("CONNECTED", flush=True)
    except Exception as error:
        print("ERROR", type(error).__name__, " ".join(str(error).split())[:300], flush=True)
    os._exit(0)


def pair(ranks: list[int], devices: list[int], limit: float) -> tuple[list[str], float]:
    """What each of some ranks of a group of two says, and how long it took."""
    from rlhfkit.rollout.weight_sync.process_group.rendezvous import open_store

    store, start = open_store("127.0.0.1", 30), time.perf_counter()
    code = "from benchmarks.gpu_check.correctness.processes.nccl import join; join()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(store.port), str(limit), str(device)],
            cwd=ROOT,
            env=os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank, device in zip(ranks, devices, strict=True)
    ]
    try:
        said = [process.communicate(timeout=limit + 45)[0].strip() for process in processes]
    finally:
        for process in processes:
            process.kill()
    return said, time.perf_counter() - start


@check("nccl/one_gpu_for_two", seconds=120, gpus=1)
def two_processes_on_one_gpu(setting: Setting) -> Iterator[Figure]:
    """NCCL refuses it; the refusal must be an error within the limit, and no hang."""
    said, seconds = pair([0, 1], [0, 0], 20.0)
    yield Figure("NCCL says", said[0] or "nothing")
    yield Figure("ranks that ended without an error", sum("ERROR" not in one for one in said), 0)
    yield Figure("seconds until both had ended", seconds, 60.0, "s")


@check("nccl/peer_never_comes", seconds=120, gpus=1)
def a_peer_that_never_comes(setting: Setting) -> Iterator[Figure]:
    """Rank 0 of two, alone: an error after the time limit."""
    said, seconds = pair([0], [0], 5.0)
    yield Figure("rank 0 says", said[0] or "nothing")
    yield Figure("it ended without an error", float("ERROR" not in said[0]), 0)
    yield Figure("seconds until it had ended", seconds, 45.0, "s")
