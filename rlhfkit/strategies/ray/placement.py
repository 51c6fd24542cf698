"""A placement group with one bundle per rank, or an error that names what is missing."""

import importlib.util
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from rlhfkit.ray_resources import PlacementError

_SECONDS_UNTIL_MESSAGE = 10.0


def require_ray() -> Any:
    """Return the ``ray`` module, or raise ModuleNotFoundError with the extra to install."""
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError(
            "Starting ranks with Ray (launcher='ray', or any notebook with several devices) needs Ray, which is not"
            " installed: pip install 'rlhfkit[rollout]', or 'rlhfkit[cpu]' on a machine without GPUs."
        )
    import ray

    return ray


def placement_strategy(num_ranks: int, num_nodes: int) -> str:
    """Return Ray's strategy for spreading the bundles over machines.

    - One machine: ``STRICT_PACK``, all ranks on one, with shared memory and fast links.
    - One rank on each of several machines: ``STRICT_SPREAD``.
    - Several ranks on several machines: ``PACK``, which fills machines one after another, as Ray cannot place k ranks
      on each. An uneven split trains the same, because ranks are numbered after placement.
    """
    if num_nodes == 1:
        return "STRICT_PACK"
    return "STRICT_SPREAD" if num_ranks == num_nodes else "PACK"


def create_placement_group(bundle: dict[str, float], num_ranks: int, num_nodes: int, timeout: float) -> Any:
    """Create a placement group of ``num_ranks`` bundles, and wait up to ``timeout`` seconds until Ray has placed it.

    ``bundle`` holds the resources of one rank. The cluster may have to start machines first. Raises PlacementError,
    with the missing resources, if the time is up.
    """
    import ray

    strategy = placement_strategy(num_ranks, num_nodes)
    group = ray.util.placement_group([bundle] * num_ranks, strategy=strategy)
    try:
        if not group.wait(min(timeout, _SECONDS_UNTIL_MESSAGE)):
            missing = missing_resources(bundle, num_ranks, num_nodes)
            rank_zero_info(f"Waiting up to {timeout:g} s for Ray to place {num_ranks} ranks: {missing}")
            if not group.wait(max(timeout - _SECONDS_UNTIL_MESSAGE, 0)):
                raise PlacementError(
                    f"Ray could not place {num_ranks} rank(s) of {_text(bundle)} ({strategy}) within {timeout:g} s:"
                    f" {missing_resources(bundle, num_ranks, num_nodes)} End what else uses the cluster, add"
                    " machines, or change Trainer(devices=...), RLHFDeepSpeedStrategy(num_nodes=...,"
                    " resources_per_rank=..., init_timeout=...)."
                )
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def missing_resources(bundle: dict[str, float], num_ranks: int, num_nodes: int) -> str:
    """Return sentences that say which resources are missing."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    lacking = []
    for name, each in bundle.items():
        need, have = each * num_ranks, total.get(name, 0.0)
        if have < need:
            lacking.append(f"{need:g} {name} are needed and the cluster has {have:g}.")
        elif free.get(name, 0.0) < need:
            lacking.append(f"{need:g} {name} are needed and {free.get(name, 0.0):g} of {have:g} are free.")
        elif num_nodes == 1 and max(node.get(name, 0.0) for node in machines) < need:
            most = max(node.get(name, 0.0) for node in machines)
            lacking.append(f"{need:g} {name} are needed on one machine and the largest has {most:g} (num_nodes=1).")
    if num_nodes > len(machines):
        lacking.append(f"{num_nodes} machines are needed and the cluster has {len(machines)}.")
    return " ".join(lacking) or f"no machines have {_text(bundle)} free together, {num_ranks} times."


def _text(bundle: dict[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in bundle.items())
