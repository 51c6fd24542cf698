"""What the roles of a run ask for: how many processes, with which resources each, or whose they share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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
        """Check the numbers."""
        check_integer("RoleResources.processes", self.processes, minimum=1)
        for name, amount in (self.resources or {}).items():
            check_number(f"RoleResources.resources[{name!r}]", amount, above=0)
        if self.resources is not None and not self.resources:
            raise ValueError("RoleResources.resources must name what a process needs, as in {'GPU': 1}, or be left out")
        if self.machines not in (None, "pack", "spread"):
            raise ValueError(f"RoleResources.machines must be 'pack', 'spread' or None, got {self.machines!r}")


RoleRequest = int | RoleResources | Mapping[str, Any] | str
"""A number of processes, their resources, the same as a mapping (YAML), or ``"with trainer"``."""


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
