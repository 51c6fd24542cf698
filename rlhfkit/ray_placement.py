"""What processes need of Ray's cluster: its machines, placement groups that hold it, and errors that say what lacks."""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Resources = Mapping[str, float]
"""Amounts by Ray's names."""

_SECONDS_UNTIL_MESSAGE = 10.0
_CHECK_SECONDS = 5.0
_MAX_MACHINES = 8
"""Of which an error says what is free."""


class PlacementError(RuntimeError):
    """Ray's cluster cannot hold the processes of a run."""


class ReservedResources(dict[str, float]):
    """Ray resources of each process of a role, which bundles of a placement group hold.

    It can be given wherever resources are: ``ModelPool(resources=...)``,
    ``RLHFDeepSpeedStrategy(resources_per_rank=...)``. Plain values, so it can be pickled and sent to the process that
    starts the role; that process must be connected to the same cluster, and the one that made the group must live.

    Args:
        resources: Of each process.
        group: Hexadecimal id of the placement group.
        bundles: Index of the bundle of each process.
    """

    def __init__(self, resources: Mapping[str, float], group: str, bundles: Sequence[int]) -> None:
        super().__init__(resources)
        self.group = group
        self.bundles = tuple(bundles)

    def placement_group(self) -> Any:
        """Return Ray's object for the group."""
        from ray import PlacementGroupID
        from ray.util.placement_group import PlacementGroup

        return PlacementGroup(PlacementGroupID.from_hex(self.group))

    def check_processes(self, processes: int, what: str) -> None:
        """Raise PlacementError unless there is a bundle for each of so many processes."""
        if processes != len(self.bundles):
            raise PlacementError(
                f"Placement holds resources for {len(self.bundles)} {what}, and {processes} are to be started: give "
                "both the same number"
            )


def check_whole_gpus(resources: Mapping[str, float] | None) -> None:
    """Raise ValueError if the ranks of a group, with these resources each, would share GPUs."""
    gpus = (resources or {}).get("GPU", 0)
    if gpus % 1:
        raise ValueError(
            f"resources={dict(resources or {})}: a rank of several needs whole GPUs, as NCCL does not share them; "
            "give each 1, or have one rank"
        )


def actor_options(resources: Mapping[str, float] | None, process: int) -> dict[str, Any]:
    """Return the options of the Ray actor of a process.

    Args:
        resources: Of each process; ``None``: none that are counted.
        process: Its number, from 0; says which bundle of :class:`ReservedResources` it has.
    """
    others = dict(resources or {})
    options: dict[str, Any] = {"num_cpus": others.pop("CPU", 0), "num_gpus": others.pop("GPU", 0), "resources": others}
    options |= {"memory": others.pop("memory")} if "memory" in others else {}
    if isinstance(resources, ReservedResources):
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            resources.placement_group(), placement_group_bundle_index=resources.bundles[process]
        )
    return options


# ---------------------------------------------------------------- machines


@dataclass(frozen=True)
class Machine:
    """A machine of Ray's cluster."""

    node: str
    """Ray's id."""
    name: str
    total: Resources
    free: Resources


def cluster_machines() -> list[Machine]:
    """Return the machines of the cluster; names that several have are made unique by Ray's ids."""
    import ray
    from ray._private.state import available_resources_per_node  # Ray 2.60 has no public way to ask for one node

    free = available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    names = Counter(node["NodeManagerHostname"] for node in nodes)
    return [
        Machine(
            node["NodeID"],
            node["NodeManagerHostname"]
            if names[node["NodeManagerHostname"]] == 1
            else f"{node['NodeManagerHostname']} ({node['NodeID'][:4]})",
            node["Resources"],
            free.get(node["NodeID"], {}),
        )
        for node in nodes
    ]


def fewest_machines(processes: int, need: Resources, machines: Sequence[Resources]) -> int | None:
    """Return the fewest machines that hold some processes together, with equally many on each.

    Args:
        processes: How many there are.
        need: Resources of all of them.
        machines: Resources of each machine that may be used.

    Returns:
        A divisor of ``processes``; ``None`` if there are too few machines that are large enough.
    """
    for count in range(1, processes + 1):
        if processes % count:
            continue
        part = {name: amount / count for name, amount in need.items()}
        fitting = sum(all(machine.get(name, 0) >= amount for name, amount in part.items()) for machine in machines)
        if fitting >= count:
            return count
    return None


def text(resources: Resources, only: Resources | None = None) -> str:
    """Resources in words: ``1 GPU + 2 CPU``; ``only``: those that it names."""
    names = sorted(resources if only is None else only, key=lambda name: (name != "GPU", name != "CPU", name))
    return " + ".join(f"{resources.get(name, 0):g} {name}" for name in names) or "nothing"


# ---------------------------------------------------------------- placement groups


def hold_bundles(
    bundle: Resources,
    count: int,
    *,
    strategy: str,
    timeout: float,
    what: str,
    cure: str,
    machines: int = 1,
    error_type: type[Exception] = PlacementError,
) -> Any:
    """Create a placement group of equal bundles and wait until Ray has placed it. The cluster may start machines first.

    Args:
        bundle: Resources of each.
        count: Number of bundles.
        strategy: Ray's: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        timeout: Seconds in which Ray must have found room.
        what: The processes, for messages: ``"engine(s)"``.
        cure: Sentence that ends the error.
        machines: That must be there at least, beside what the strategy says.
        error_type: Raised if the time is up, with what is missing; nothing is held then.
    """
    import ray

    group = ray.util.placement_group([dict(bundle)] * count, strategy=strategy)
    wanted = f"{count} {what} of {text(bundle)} ({strategy})"
    machines = {"STRICT_PACK": 1, "STRICT_SPREAD": count}.get(strategy, machines)
    try:
        if not _wait(group, min(timeout, _SECONDS_UNTIL_MESSAGE)):
            missing = _missing(bundle, count, machines, one_machine=strategy == "STRICT_PACK")
            log.warning("waiting up to %g s for Ray to place %s: %s", timeout, wanted, missing)
            if not _wait(group, timeout - _SECONDS_UNTIL_MESSAGE):
                missing = _missing(bundle, count, machines, one_machine=strategy == "STRICT_PACK")
                raise error_type(f"Ray could not place {wanted} within {timeout:g} s: {missing} {cure}")
    except BaseException:
        release_bundles(group)
        raise
    return group


def release_bundles(group: Any) -> None:
    """Give the resources of a placement group back; Ray ends the processes that have them."""
    import ray

    if ray.is_initialized():
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(group)


def _wait(group: Any, timeout: float) -> bool:
    """Wait for a group; Ray counts what was given back as free only seconds later."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if group.wait(min(left, _CHECK_SECONDS)):
            return True
    return bool(group.wait(0))


def _missing(bundle: Resources, count: int, machines: int, *, one_machine: bool) -> str:
    """Return sentences that say which resources are missing, and what is free."""
    nodes, lacking = cluster_machines(), []
    for name, each in bundle.items():
        need, have = each * count, sum(node.total.get(name, 0.0) for node in nodes)
        free, most = sum(node.free.get(name, 0.0) for node in nodes), max(node.total.get(name, 0.0) for node in nodes)
        if have < need:
            lacking.append(f"{need:g} {name} are needed and the cluster has {have:g}.")
        elif free < need:
            lacking.append(f"{need:g} {name} are needed and {free:g} of {have:g} are free.")
        elif one_machine and most < need:
            lacking.append(f"{need:g} {name} are needed on one machine and the largest has {most:g}.")
    if machines > len(nodes):
        lacking.append(f"{machines} machines are needed and the cluster has {len(nodes)}.")
    lacking = lacking or [f"no machines have {text(bundle)} free together, {count} times."]
    free_there = "; ".join(f"{node.name}: {text(node.free, bundle)}" for node in nodes[:_MAX_MACHINES])
    return " ".join([*lacking, f"Free are {free_there}."])
