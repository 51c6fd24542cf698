"""What the roles of a run ask for, and placement groups for all, which are held before anything starts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhfkit.ray_placement import (
    Machine,
    PlacementError,
    ReservedResources,
    Resources,
    cluster_machines,
    hold_bundles,
    release_bundles,
)
from rlhfkit.validation import check_integer, check_number

Spread = Literal["pack", "spread"]
WITH = "with "
"""Begins the words of a role that has no processes or no resources of its own: ``"with trainer"``."""


@dataclass(frozen=True)
class RoleResources:
    """Processes of a role and the Ray resources of each.

    Args:
        processes: Ranks of the trainer or of the critic, engines, replicas of a frozen model.
        resources: Of each: ``{"GPU": 2, "CPU": 4}``, or resources of your own names; ``None``: a core, and a GPU where
            the cluster has any. One process is on one machine.
        machines: ``"pack"``: on as few machines as possible; ``"spread"``: on as many. ``None``: engines are spread,
            other roles packed.

    Raises:
        ValueError: If a number is out of range.
    """

    processes: int
    resources: Mapping[str, float] | None = None
    machines: Spread | None = None

    def __post_init__(self) -> None:
        check_integer("RoleResources.processes", self.processes, minimum=1)
        for name, amount in (self.resources or {}).items():
            check_number(f"RoleResources.resources[{name!r}]", amount, above=0)
        if self.resources is not None and not self.resources:
            raise ValueError("RoleResources.resources must name what a process needs, as in {'GPU': 1}, or be left out")
        if self.machines not in (None, "pack", "spread"):
            raise ValueError(f"RoleResources.machines must be 'pack', 'spread' or None, got {self.machines!r}")


RoleRequest = int | RoleResources | Mapping[str, Any] | str
"""A number of processes, their resources, the same as a mapping, or ``"with trainer"``."""


@dataclass(frozen=True)
class Request:
    """A role's part of a plan, checked."""

    role: str
    own: RoleResources | None
    """Its processes; ``None``: it shares another role's."""
    shares: str | None = None
    """The role whose resources it shares."""


@dataclass(frozen=True)
class Requests:
    """All roles of a plan, in the order in which they are placed."""

    roles: dict[str, Request] = field(default_factory=dict)

    @classmethod
    def parse(cls, **given: RoleRequest | None) -> "Requests":
        """Check what is asked for; roles that are ``None`` are left out.

        Raises:
            TypeError: If a request is none of the kinds that are allowed.
            ValueError: If a number is out of range, or a role shares one that it cannot.
        """
        roles = {name: _request(name, value) for name, value in given.items() if value is not None}
        for request in roles.values():
            if request.shares is not None:
                _check_sharing(request, roles)
        return cls(roles)

    def sharers(self, role: str) -> int:
        """How many roles have a part of this role's resources, itself included."""
        return 1 + sum(request.shares == role for request in self.roles.values())


def _request(role: str, value: RoleRequest) -> Request:
    if isinstance(value, str):
        if not value.startswith(WITH):
            raise ValueError(f"Placement({role}=...) takes a number of processes or 'with trainer', got {value!r}")
        return Request(role, None, value.removeprefix(WITH))
    if isinstance(value, RoleResources):
        return Request(role, value)
    if isinstance(value, Mapping):
        try:
            return Request(role, RoleResources(**value))
        except TypeError as error:
            raise TypeError(
                f"Placement({role}=...) as a mapping takes processes, resources and machines, got {dict(value)}"
            ) from error
    check_integer(f"Placement.{role}", value, minimum=1, why="leave a role out that the run does not have")
    return Request(role, RoleResources(int(value)))


def _check_sharing(request: Request, roles: Mapping[str, Request]) -> None:
    """Raise ValueError unless a role may share the other's processes or resources."""
    role, host = request.role, str(request.shares)
    if role == "trainer":
        raise ValueError("Placement(trainer=...) takes a number of ranks: other roles may be with the trainer")
    if host == "trainer":
        return
    placed = [name for name, one in roles.items() if one.own is not None and name not in (role, "trainer", "engines")]
    if role == "engines" or host not in placed:
        may = ["trainer"] if role == "engines" else ["trainer", *placed]
        raise ValueError(
            f"Placement({role}='with {host}'): {role} can be with {' or '.join(may)}. Engines share GPUs with the "
            "trainer only, and a role that shares another's resources cannot be shared in turn"
        )


# ---------------------------------------------------------------- the plan


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
        assert request.own is not None
        role, processes = request.role, request.own.processes
        spread = request.own.machines or ("spread" if role == "engines" else "pack")
        strategy = spread.upper()
        if role == "trainer" and request.own.machines is None and trainer_machines in (1, processes):
            strategy = "STRICT_PACK" if trainer_machines == 1 else "STRICT_SPREAD"
        self._groups[role] = hold_bundles(
            each,
            processes,
            strategy=strategy,
            timeout=timeout,
            what=f"process(es) of {role}",
            cure=(
                f"Placed before: {', '.join(self._groups) or 'none'}. End what else uses the cluster, add machines, or "
                f"ask for less: Placement({role}=...)"
            ),
        )

    def machines_of(self, role: str) -> dict[str, int]:
        """Return the number of processes of a placed role by the name of their machine."""
        import ray

        names = {machine.node: machine.name for machine in cluster_machines()}
        nodes = ray.util.placement_group_table(self._groups[role])["bundles_to_node_id"].values()
        return dict(Counter(names.get(node, node) for node in nodes))

    def close(self) -> None:
        for group in self._groups.values():
            release_bundles(group)
        self._groups = {}


def _order(request: Request, each: Resources) -> tuple[bool, float, float]:
    """The trainer first, then the largest processes, as small ones fit into what is left."""
    return request.role != "trainer", -each.get("GPU", 0), -each.get("CPU", 0)


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


def default_resources(own: RoleResources, gpus: bool) -> Resources:
    """Return the resources of a process: those asked for, or a core and a GPU where there are any."""
    if own.resources is not None:
        return dict(own.resources)
    return {"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0}
