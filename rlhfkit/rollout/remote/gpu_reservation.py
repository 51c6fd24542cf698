"""``GPUReservation``: keeps Ray from giving the GPUs of training ranks to engines.

Ray takes the GPUs of ranks of a script, torchrun or Slurm for free. So every free GPU of their machines is claimed
before engines are placed; the ranks' are held as long as the engines live, the others are released. Each engine checks
its own GPUs before it starts.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rlhfkit import gpus
from rlhfkit.rollout.remote import gpu_holder
from rlhfkit.rollout.remote.placement import RankLocation

log = logging.getLogger(__name__)

_RELEASE_SECONDS = 10.0  # Ray counts what was released, or held by a driver that has ended, as free only later
_PAUSE_SECONDS = 0.5
_CLAIM_SECONDS = 60.0  # enough to start processes that import nothing; GPUs that others claim meanwhile never come


class GPUReservation:
    """Claims of the GPUs of ranks that Ray does not know of; Ray may take ``timeout`` seconds, at most 60."""

    def __init__(self, ranks: Sequence[RankLocation], timeout: float) -> None:
        self._holders: list[Any] = []
        self.gpus: list[RankLocation] = []
        """The GPUs that are held; a rank's GPU that another job has claimed, or that Ray does not have, is not held."""
        outside = [rank for rank in ranks if rank.gpu is not None and not rank.on_ray]
        if not outside:
            return
        try:
            self._claim(outside, min(timeout, _CLAIM_SECONDS))
        except BaseException:
            self.close()
            raise
        if self.gpus:
            log.info("held for the training ranks: %s", ", ".join(map(str, self.gpus)))

    def _claim(self, ranks: Sequence[RankLocation], timeout: float) -> None:
        """Hold the GPUs of the ranks; while others have some of them, again for some seconds, as they may release them.

        A pool that is closed and started again finds its own earlier claims.
        """
        deadline = time.monotonic() + _RELEASE_SECONDS
        while True:
            missing = [rank for rank in ranks if not any(held.has_same_gpu(rank) for held in self.gpus)]
            nodes = _free_gpus({rank.host for rank in missing})
            for node, free, _ in nodes:
                if free:
                    self._hold(node, free, missing, timeout)
            taken = any(total > free for _, free, total in nodes)
            if not taken or len(self.gpus) == len(ranks) or time.monotonic() > deadline:
                return
            time.sleep(_PAUSE_SECONDS)

    def _hold(self, node: str, count: int, ranks: Sequence[RankLocation], timeout: float) -> None:
        """Claim all free GPUs of a machine, and hold those of the ranks."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for module in (gpus, gpu_holder):
            ray.cloudpickle.register_pickle_by_value(module)
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        kind = ray.remote(gpu_holder.GPUHolder).options(num_cpus=0, num_gpus=1, scheduling_strategy=there)
        claims = {holder.gpus.remote(): holder for holder in [kind.remote() for _ in range(count)]}
        try:
            ready, late = ray.wait(list(claims), num_returns=count, timeout=timeout)
            if late:  # claimed by others since Ray reported them as free
                log.warning("%d GPU(s) that Ray counted as free could not be claimed within %g s", len(late), timeout)
            for ref in ready:
                (gpu,) = ray.get(ref)
                found = RankLocation(**gpu, on_ray=True)
                if any(found.has_same_gpu(rank) for rank in ranks):
                    self._holders.append(claims.pop(ref))
                    self.gpus.append(found)
        finally:
            _kill(claims.values())

    def close(self) -> None:
        """Release the GPUs; a second call does nothing."""
        _kill(self._holders)
        self._holders, self.gpus = [], []


def _kill(holders: Iterable[Any]) -> None:
    import ray

    for holder in holders:
        with contextlib.suppress(Exception):  # Ray may have ended, and all claims with it
            ray.kill(holder, no_restart=True)


def _free_gpus(hosts: set[str]) -> list[tuple[str, int, int]]:
    """Return Ray's id, the free GPUs and all GPUs of each machine with one of these names that has any."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public way to ask for one node

    free = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] in hosts]
    return [
        (node["NodeID"], math.floor(free.get(node["NodeID"], {}).get("GPU", 0)), total)
        for node in nodes
        if (total := math.floor(node["Resources"].get("GPU", 0)))
    ]
