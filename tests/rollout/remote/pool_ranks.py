"""What ranks do with a pool of engines without a model; each rank is a process (``strategies/ranks.py``)."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray_worker
import torch
import torch.distributed as dist
from test_rank_store import start
from waiting import has_ended, until

from rlhfkit.data.types import Prompt
from rlhfkit.rank_store import RankError, rank_store
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.rollout.supervision.engines import ENGINE_NAMESPACE
from rlhfkit.rollout.supervision.health import State
from rlhfkit.rollout.vllm.placement import RankLocation
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender
from rollout.toy_engines import HELD, look, request, toy_engines

SPEC = SamplingSpec(group_size=2, max_new_tokens=8)


class ToyPool(VLLMPool):
    """One engine that answers a prompt at once; from token 120 on never."""

    def __init__(self) -> None:
        super().__init__(device="cpu", generate_timeout=60.0, sync_timeout=60.0, bucket_bytes=2**20)

    def prepare_requests(self, model: str, trust_remote_code: bool) -> None:
        """There is no model; from here on ranks wait for the engines, longer than a collective may take."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))

    def start_engines(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool, ranks: list[RankLocation]
    ) -> None:
        self.connect_to_ray(ranks)
        self.sender = ProcessGroupSender("gloo", timeout=60.0)
        self.engines = toy_engines(self.num_engines, dist.get_world_size(), recovery_timeout=5.0)

    def make_request(self, prompt: Prompt, index: int, **_: Any) -> Request:
        first = prompt.token_ids.tolist()[0]
        return request(first, seconds=HELD if first >= 120 else 0.0)


def open_pool() -> tuple[int, ToyPool]:
    """Join the other rank and start the engine, which takes longer than the process group's time limit."""
    rank, _ = start()
    rank_store()
    ray_worker.use()
    pool = ToyPool()
    pool.start("no model", dtype=torch.float32, load_weights=True)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=60))
    return rank, pool


def in_flight(pool: ToyPool) -> Any:
    """A stream of this rank whose request is not answered."""
    stream = pool.stream(SPEC, iteration=0)
    stream.submit([Prompt(0, [120])])
    return stream


def a_rank_dies(folder: Path) -> None:
    """Rank 1 ends without a word while an engine works for it; rank 0 goes on, then closes the pool."""
    import ray

    rank, pool = open_pool()
    if rank == 1:
        stream = in_flight(pool)
        [(_, engine, key)] = stream.scheduler._in_flight.values()
        until(lambda: look(engine, lambda one: key in one.begun))
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os._exit(0)
    until(lambda: has_ended(pids[1]))
    (sample, _) = pool.generate([Prompt(1, [1])], SPEC, iteration=0)
    assert sample.token_ids.tolist() == [1, 1, 1]
    assert pool.engines is not None
    assert [(handle.state, handle.restarts) for handle in pool.engines.handles] == [(State.SERVING, 0)]
    pool.close()

    def left() -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [one["name"] for one in named if one["namespace"] == ENGINE_NAMESPACE]

    until(lambda: not left(), report=left)


def rank_0_dies(folder: Path) -> None:
    """Rank 0 is killed while rank 1 waits for samples."""
    rank, pool = open_pool()
    stream = in_flight(pool)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)  # rank 1 waits by now, or else will wait for a rank that is dead already
        os.kill(os.getpid(), 9)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0, which holds the table of the engines, does not answer"):
        stream.collect(1)
    stream.close()
    pool.close()
    assert time.monotonic() - start < 50  # and not the 60 in which a request must be finished
