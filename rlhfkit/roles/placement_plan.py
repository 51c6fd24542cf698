"""Placement groups for all roles of a run: all are held before anything starts, or an error says what is missing."""

import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfkit.ray_resources import PlacementError, ReservedResources
from rlhfkit.roles.role_resources import Request, Requests, RoleResources

Resources = Mapping[str, float]


@dataclass(frozen=True)
class PlannedRole:
    """A line of the plan."""

    role: str
    processes: int
    resources: Resources
    """Of each process; empty: those of the role that it shares."""
    machines: Mapping[str, int]
    """Number of processes by machine."""
    note: str = ""


@dataclass(frozen=True)
class Machine:
    """A machine of Ray's cluster."""

    node: str
    """Ray's id."""
    name: str
    total: Resources
    free: Resources


def cluster_machines() -> list[Machine]:
    """Return the machines of the cluster, the largest names made unique by Ray's ids."""
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


def fewest_machines(ranks: int, each: Resources, machines: Sequence[Machine]) -> int:
    """Return the smallest number of machines over which the ranks can be divided evenly; 1 if there is none."""
    for count in range(1, ranks + 1):
        share = ranks // count
        room = [one for one in machines if all(one.total.get(name, 0) >= share * each[name] for name in each)]
        if ranks % count == 0 and len(room) >= count:
            return count
    return 1


class ReservedPlan:
    """Placement groups of the roles with resources of their own.

    Args:
        requests: All roles.
        each: Resources of a process, by role.
        trainer_machines: Over how many machines the ranks are divided; ``None``: the trainer is not placed by Ray.
        timeout: Seconds in which Ray must have found room for each.

    Raises:
        PlacementError: If there is no room; nothing is held then.
    """

    def __init__(
        self, requests: Requests, each: Mapping[str, Resources], trainer_machines: int | None, timeout: float
    ) -> None:
        self._groups: dict[str, Any] = {}
        self.reserved: dict[str, ReservedResources] = {}
        """What each role can start processes with; the part of a role that shares another's resources included."""
        placed = [
            request
            for request in requests.roles.values()
            if request.own is not None and (request.role != "trainer" or trainer_machines is not None)
        ]
        if placed:
            check_totals(placed, each, cluster_machines())
        try:
            for request in sorted(placed, key=lambda one: _order(one, each[one.role])):
                self._reserve(request, each[request.role], trainer_machines, timeout)
        except BaseException:
            self.close()
            raise
        for role, request in requests.roles.items():
            host = request.shares or role
            if host in self._groups and not (host == "trainer" and role != "trainer"):
                part = {name: amount / requests.sharers(host) for name, amount in each[host].items()}
                whole = each[host] if host == "trainer" else part
                group = self._groups[host]
                self.reserved[role] = ReservedResources(whole, group.id.hex(), range(group.bundle_count))

    def _reserve(self, request: Request, each: Resources, trainer_machines: int | None, timeout: float) -> None:
        import ray

        assert request.own is not None
        role, processes = request.role, request.own.processes
        spread = request.own.machines or ("spread" if role == "engines" else "pack")
        strategy = spread.upper()
        if role == "trainer" and request.own.machines is None and trainer_machines in (1, processes):
            strategy = "STRICT_PACK" if trainer_machines == 1 else "STRICT_SPREAD"
        group = ray.util.placement_group([dict(each)] * processes, strategy=strategy)
        if not _wait(group, timeout):
            free = "; ".join(f"{one.name}: {text(one.free, each)}" for one in cluster_machines())
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(group)
            held = ", ".join(self._groups) or "none"
            raise PlacementError(
                f"Ray found no room for the {processes} process(es) of {role} with {text(each)} each ({strategy}) "
                f"within {timeout:g} s. Free are {free}; placed before: {held}. End what else uses the cluster, add "
                f"machines, or ask for less: Placement({role}=...)"
            )
        self._groups[role] = group

    def machines_of(self, role: str) -> dict[str, int]:
        """Return the number of processes of a placed role by the name of their machine."""
        import ray

        names = {machine.node: machine.name for machine in cluster_machines()}
        nodes = ray.util.placement_group_table(self._groups[role])["bundles_to_node_id"].values()
        return dict(Counter(names.get(node, node) for node in nodes))

    def close(self) -> None:
        """Give the resources back; processes that have them are ended by Ray."""
        import ray

        for group in self._groups.values():
            if ray.is_initialized():
                with contextlib.suppress(Exception):
                    ray.util.remove_placement_group(group)
        self._groups = {}


def _order(request: Request, each: Resources) -> tuple[bool, float, float]:
    """The trainer first, then the largest processes, as small ones fit into what is left."""
    return request.role != "trainer", -each.get("GPU", 0), -each.get("CPU", 0)


def _wait(group: Any, timeout: float) -> bool:
    """Wait for a group; Ray counts what was given back as free only seconds later."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if group.wait(min(timeout, 5.0)):
            return True
    return bool(group.wait(0))


def check_totals(placed: Sequence[Request], each: Mapping[str, Resources], machines: Sequence[Machine]) -> None:
    """Raise PlacementError if the cluster, or its largest machine, could not hold the plan even if it were idle."""
    for name in sorted({name for request in placed for name in each[request.role]}, key=lambda name: name != "GPU"):
        needs = {
            request.role: request.own.processes * each[request.role].get(name, 0) for request in placed if request.own
        }
        needs = {role: amount for role, amount in needs.items() if amount}
        have = {one.name: one.total.get(name, 0) for one in machines}
        there = ", ".join(f"{machine}: {amount:g}" for machine, amount in have.items())
        if sum(needs.values()) > sum(have.values()):
            roles = ", ".join(f"{role} {amount:g}" for role, amount in needs.items())
            raise PlacementError(
                f"the plan needs {sum(needs.values()):g} {name}(s) ({roles}), and Ray's cluster has "
                f"{sum(have.values()):g} ({there}): {sum(needs.values()) - sum(have.values()):g} are missing. Ask for "
                "fewer processes, let roles share GPUs ('with trainer'), or add machines"
            )
        for role in needs:
            if each[role][name] > max(have.values()):
                raise PlacementError(
                    f"a process of {role} needs {each[role][name]:g} {name}(s) on one machine, and the largest has "
                    f"{max(have.values()):g} ({there})"
                )


def text(resources: Resources, only: Resources | None = None) -> str:
    """Resources in words: ``1 GPU + 2 CPU``; ``only``: those that it names."""
    names = sorted(resources if only is None else only, key=lambda name: (name != "GPU", name != "CPU", name))
    return " + ".join(f"{resources.get(name, 0):g} {name}" for name in names) or "nothing"


def default_resources(own: RoleResources, gpus: bool) -> Resources:
    """Return the resources of a process: those asked for, or a core and a GPU where there are any."""
    if own.resources is not None:
        return dict(own.resources)
    return {"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0}
