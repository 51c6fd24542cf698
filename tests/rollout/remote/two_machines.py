"""A Ray cluster of two machines with one core each, which are processes here, and a process that uses it."""

import os
import time
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster
from waiting import until


def place_engines(folder: Path) -> dict[str, Any]:
    """Place engines on it, and return the outcome; started by ``strategies/ranks.py``."""
    import ray

    from rlhfkit.ray_session import cluster_address
    from rlhfkit.rollout.errors import EngineError
    from rlhfkit.rollout.vllm.placement import DedicatedPlacement, start_ray_for_engines

    head = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = cluster.address
    report: dict[str, Any] = {}
    try:
        start_ray_for_engines(num_cpus=1)
        cluster.wait_for_nodes()
        report["loopback"] = cluster_address() == "127.0.0.1"
        dedicated = DedicatedPlacement(2, cpus=1, gpus=0, timeout=60)
        placed = ray.util.placement_group_table(dedicated._group)["bundles_to_node_id"]
        report["machines"] = len(set(placed.values()))
        until(lambda: not ray.available_resources().get("CPU"))  # which machines tell a moment later
        asked = {
            "too_many": (3, 1, 0, 1),
            "taken": (2, 1, 0, 1),
            "no_gpu": (1, 1, 1, 1),
            "too_large": (1, 2, 0, 1),
            "indivisible": (1, 2, 0, 3),
        }
        for name, (engines, cpus, gpus, processes) in asked.items():
            start = time.monotonic()
            try:
                DedicatedPlacement(engines, cpus=cpus, gpus=gpus, timeout=1, processes=processes)
            except EngineError as error:
                report[name] = [str(error), time.monotonic() - start]
        dedicated.close()
        divided = DedicatedPlacement(1, cpus=2, gpus=0, timeout=60, processes=2)
        placed = ray.util.placement_group_table(divided._group)["bundles_to_node_id"]
        report["divided"] = [len(set(placed.values())), len(divided.placements()[0].others)]
        divided.close()
        DedicatedPlacement(2, cpus=1, gpus=0, timeout=60).close()  # what was given back can be had again
    finally:
        ray.shutdown()
        cluster.shutdown()
    return report
