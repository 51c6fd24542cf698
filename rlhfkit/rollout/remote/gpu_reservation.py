"""No engine gets a training rank's GPU, whoever started the ranks.

Ranks that are Ray actors own their GPUs in Ray's books. Ranks of a script, of torchrun or of Slurm do not: Ray takes
their GPUs for free. So before engines are placed, every free GPU of the ranks' machines is claimed for a moment and
compared with the ranks': those are held as long as the engines live, the others given back. Each engine looks at its
own GPUs once more before it starts.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rlhfkit.rollout.remote import gpu_holder
from rlhfkit.rollout.remote.placement import RankLocation

log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 60.0
"""For processes that import nothing to start. A GPU that was claimed by others meanwhile is waited for in vain."""


class Reservation:
    """The GPUs of ranks that Ray does not know of, claimed from Ray.

    Args:
        seats: Of all ranks.
        timeout: Seconds that Ray may take, if that is less than a minute.
    """

    def __init__(self, seats: Sequence[RankLocation], timeout: float) -> None:
        self._holders: list[Any] = []
        self.gpus: list[RankLocation] = []
        """Those that are held. A rank's GPU that somebody else has claimed, or that Ray does not have, is not."""
        outside = [seat for seat in seats if seat.gpu is not None and not seat.on_ray]
        if not outside:
            return
        try:
            for node, count in _free_gpus({seat.host for seat in outside}):
                self._hold(node, count, outside, min(timeout, _PATIENCE_SECONDS))
        except BaseException:
            self.close()
            raise
        if self.gpus:
            log.info("held for the training ranks: %s", ", ".join(map(str, self.gpus)))

    def _hold(self, node: str, count: int, ranks: Sequence[RankLocation], timeout: float) -> None:
        """Claim all free GPUs of a machine, and keep those of the ranks."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.cloudpickle.register_pickle_by_value(gpu_holder)
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        kind = ray.remote(gpu_holder.GPUHolder).options(num_cpus=0, num_gpus=1, scheduling_strategy=place)
        claims = {holder.gpus.remote(): holder for holder in [kind.remote() for _ in range(count)]}
        try:
            ready, late = ray.wait(list(claims), num_returns=count, timeout=timeout)
            if late:  # taken by others between the question and the claim
                log.warning("%d GPU(s) that Ray counted as free could not be had within %g s", len(late), timeout)
            for ref in ready:
                (gpu,) = ray.get(ref)
                found = RankLocation(gpu["host"], gpu["gpu"], on_ray=True, uuid=gpu["uuid"])
                if any(found.is_gpu_of(rank) for rank in ranks):
                    self._holders.append(claims.pop(ref))
                    self.gpus.append(found)
        finally:
            _end(claims.values())

    def close(self) -> None:
        """Give them back; a second call does nothing."""
        _end(self._holders)
        self._holders, self.gpus = [], []


def _end(holders: Iterable[Any]) -> None:
    import ray

    for holder in holders:
        with contextlib.suppress(Exception):  # Ray may be gone, and all claims with it
            ray.kill(holder, no_restart=True)


def _free_gpus(hosts: set[str]) -> list[tuple[str, int]]:
    """Machines of these names in Ray's cluster, and how many whole GPUs nobody has claimed there."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public way to ask for one node

    free = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] in hosts]
    counts = [(str(node["NodeID"]), math.floor(free.get(node["NodeID"], {}).get("GPU", 0))) for node in nodes]
    return [(node, count) for node, count in counts if count]
