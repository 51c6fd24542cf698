"""``Placement``: where each role of a run is, in words; resources for all are held and shown before anything starts."""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhfkit.ray_placement import (
    Machine,
    PlacementError,
    ReservedResources,
    Resources,
    cluster_machines,
    fewest_machines,
    hold_bundles,
    release_bundles,
    text,
)
from rlhfkit.ray_session import join_or_start_ray
from rlhfkit.roles.critic_pool import CriticPool
from rlhfkit.roles.model_pool import ModelPool
from rlhfkit.rollout.vllm.placement import RankLocation, start_ray_for_engines, visible_gpus
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rich.table import Table

Spread = Literal["pack", "spread"]
WITH = "with "
"""Begins the words of a role that has no processes or no resources of its own: ``"with trainer"``."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK")


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
class PlannedRole:
    """A line of the plan."""

    role: str
    processes: int
    resources: Resources
    """Of each process; empty: those of the role that it shares."""
    machines: Mapping[str, int]
    """Number of processes by machine."""
    note: str = ""


class Placement:
    """Puts the roles of a run on the machines of Ray's cluster, and hands each what its constructor takes.

    The first role that is handed out, or :meth:`reserve`, joins the cluster (``RAY_ADDRESS``, or the session of this
    process) or starts Ray here, holds the resources of all roles in placement groups, and prints the plan. Nothing has
    been started then. Resources are given back by :meth:`close`, or when this process ends.

    Example::

        placement = Placement(trainer=8, engines=4, reference=2, reward=1, critic="with trainer", launcher="ray")
        module = PPOModule(
            "sft",
            parts=[Reference(placement.reference("sft")), RewardModel(placement.reward("reward"))],
            critic=placement.critic("reward"),
        )
        rollouts = RolloutCallback(engine=placement.engines(max_model_len=4096))
        strategy = RLHFDeepSpeedStrategy(stage=2, **placement.ranks())
        trainer = L.Trainer(strategy=strategy, devices=placement.devices, callbacks=[rollouts])

    A role is a number of processes, each with a core and, where the cluster has GPUs, one GPU; or
    :class:`RoleResources`, or a mapping of its fields; or ``"with trainer"``: a child of the module, or engines
    on the ranks' GPUs; or ``"with reference"`` and the like: on the devices of another role's processes, a part each.

    Args:
        trainer: Training ranks.
        engines: Inference engines; several GPUs each by ``RoleResources(4, {"GPU": 2})``.
        reference: Replicas of the reference model.
        reward: Replicas of the reward model.
        teacher: Replicas of the teacher.
        critic: Ranks of the critic.
        launcher: ``"ray"``: ranks are Ray actors, and placed too. ``None``: the script or torchrun starts them; their
            GPUs are taken for the first that this process sees, which is what ``Trainer(devices=N)`` uses.
        device: ``"cpu"`` or ``"cuda"``; ``None``: GPUs where the cluster has any.
        timeout: Seconds in which Ray must have found room for each role.

    Raises:
        TypeError: If a role is none of these.
        ValueError: If a number is out of range, or a role shares resources that it cannot.
    """

    def __init__(
        self,
        trainer: int | RoleResources | dict[str, Any] = 1,
        *,
        engines: RoleRequest | None = None,
        reference: RoleRequest | None = None,
        reward: RoleRequest | None = None,
        teacher: RoleRequest | None = None,
        critic: RoleRequest | None = None,
        launcher: Literal["ray"] | None = None,
        device: Literal["cpu", "cuda"] | None = None,
        timeout: float = 60.0,
    ) -> None:
        given = {"engines": engines, "reference": reference, "reward": reward, "teacher": teacher, "critic": critic}
        if trainer is None:
            raise TypeError("Placement(trainer=...) takes a number of ranks or RoleResources, got None")
        self.roles = checked_roles({"trainer": trainer} | given)
        """The processes of each role, or the name of the role whose resources it shares."""
        if launcher not in (None, "ray"):
            raise ValueError(f"Placement.launcher must be 'ray' or None, got {launcher!r}")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"Placement.device must be 'cpu', 'cuda' or None, got {device!r}")
        check_number("Placement.timeout", timeout, above=0, why="it is in seconds")
        self.num_ranks = self._own["trainer"].processes
        self.launcher = launcher
        self.device = device
        self.timeout = timeout
        self.plan: list[PlannedRole] = []
        """The roles and their machines, after :meth:`reserve`."""
        self._num_nodes = 1
        self._each: dict[str, Resources] = {}  # of a process of each role that has some of its own
        self._groups: dict[str, Any] | None = None  # placement groups of these; None: nothing is reserved
        self._reserved: dict[str, ReservedResources] = {}  # what the processes of a role can be started with

    @property
    def _own(self) -> dict[str, RoleResources]:
        """The roles with resources of their own."""
        return {role: own for role, own in self.roles.items() if isinstance(own, RoleResources)}

    # ---------------------------------------------------------------- the plan

    def reserve(self) -> None:
        """Hold the resources of all roles and print the plan, once.

        Does nothing on ranks other than 0.

        Raises:
            PlacementError: If the cluster has no room. It says what is missing and what there is; nothing is held then.
        """
        if self._groups is not None or not _is_first_process():
            return
        on_ray = [role for role in self._own if role != "trainer" or self.launcher == "ray"]
        gpus = self._start_ray() if on_ray else self._uses_gpus(bool(visible_gpus()))
        default = {"GPU": 1.0, "CPU": 1.0} if gpus else {"CPU": 1.0}
        self._each = {role: dict(own.resources or default) for role, own in self._own.items()}
        if self.launcher == "ray":
            need = {name: self.num_ranks * amount for name, amount in self._each["trainer"].items()}
            self._num_nodes = fewest_machines(self.num_ranks, need, [one.total for one in cluster_machines()]) or 1
        self._groups = {}
        try:
            self._hold(on_ray)
            self.plan = [self._planned(role) for role in self.roles]
        except BaseException:
            self.close()
            raise
        from rich.console import Console

        Console().print(self.table(), highlight=False)

    def _start_ray(self) -> bool:
        """Join or start Ray, without the GPUs of ranks that it does not start; returns whether GPUs are used."""
        import ray

        cores = sum(int(own.processes * (own.resources or {}).get("CPU", 1)) for own in self._own.values())
        if self.launcher == "ray":
            join_or_start_ray(num_cpus=max(cores, os.cpu_count() or 1), object_store_memory=256 * 2**20)
            return self._uses_gpus(bool(ray.cluster_resources().get("GPU", 0)))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        names = [] if self.device == "cpu" else visible_gpus()[:local]
        ranks = [RankLocation(socket.gethostname(), name, on_ray=False) for name in names]
        started_here = start_ray_for_engines(num_cpus=cores, ranks=ranks)
        gpus = self._uses_gpus(bool(ranks or ray.cluster_resources().get("GPU", 0)))
        if ranks and not started_here and _gpus_that_ray_counts_here():
            raise PlacementError(
                "Ray counts the GPUs of this machine, and takes those of ranks that it has not started for free, so it "
                "could give them to other roles: have Ray start the ranks, Placement(launcher='ray')"
            )
        return gpus

    def _uses_gpus(self, found: bool) -> bool:
        self.device = self.device or ("cuda" if found else "cpu")
        return self.device == "cuda"

    def _hold(self, roles: Sequence[str]) -> None:
        """Hold the resources of roles: the trainer first, then the largest processes, as small ones fit in between."""
        assert self._groups is not None
        if roles:
            check_totals({role: self._own[role].processes for role in roles}, self._each, cluster_machines())
        for role in sorted(roles, key=self._order):
            own = self._own[role]
            strategy = (own.machines or ("spread" if role == "engines" else "pack")).upper()
            if role == "trainer" and own.machines is None and self._num_nodes in (1, own.processes):
                strategy = "STRICT_PACK" if self._num_nodes == 1 else "STRICT_SPREAD"
            self._groups[role] = hold_bundles(
                self._each[role],
                own.processes,
                strategy=strategy,
                timeout=self.timeout,
                what=f"process(es) of {role}",
                cure=(
                    f"Placed before: {', '.join(self._groups) or 'none'}. End what else uses the cluster, add machines,"
                    f" or ask for less: Placement({role}=...)"
                ),
            )
        for role, own_or_host in self.roles.items():
            host = own_or_host if isinstance(own_or_host, str) else role
            group = self._groups.get(host)
            if group is not None and not (host == "trainer" and role != "trainer"):
                # Those that are with the trainer have no part of its resources.
                sharers = 1 if host == "trainer" else 1 + list(self.roles.values()).count(host)
                part = {name: amount / sharers for name, amount in self._each[host].items()}
                self._reserved[role] = ReservedResources(part, group.id.hex(), range(group.bundle_count))

    def _order(self, role: str) -> tuple[bool, float, float]:
        each = self._each[role]
        return role != "trainer", -each.get("GPU", 0), -each.get("CPU", 0)

    def _planned(self, role: str) -> PlannedRole:
        host, reserved = self.roles[role], self._reserved.get(role)
        if reserved is not None:
            processes = len(reserved.bundles)
            if isinstance(host, RoleResources):
                return PlannedRole(role, processes, self._each[role], self._machines_of(role))
            return PlannedRole(role, processes, reserved, self._machines_of(host), f"{WITH}{host}: a part of each")
        if role == "trainer":
            gpu = {"GPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}
            return PlannedRole(role, self.num_ranks, gpu, {socket.gethostname(): self.num_ranks}, "not started by Ray")
        note = "on the ranks' devices" if role == "engines" else "in the ranks"
        return PlannedRole(role, self.num_ranks, {}, {}, f"{WITH}trainer: {note}")

    def _machines_of(self, role: str) -> dict[str, int]:
        """The number of processes of a placed role by the name of their machine."""
        import ray

        assert self._groups is not None
        names = {machine.node: machine.name for machine in cluster_machines()}
        nodes = ray.util.placement_group_table(self._groups[role])["bundles_to_node_id"].values()
        return dict(Counter(names.get(node, node) for node in nodes))

    def table(self) -> "Table":
        """The plan as a table of rich: role, processes, resources of each, machines."""
        from rich.table import Table

        table = Table(title="Placement")
        for column in ("role", "processes", "each", "machines", ""):
            table.add_column(column, justify="right" if column == "processes" else "left")
        for row in self.plan:
            machines = ", ".join(f"{name} x {count}" for name, count in row.machines.items())
            each = text(row.resources) if row.resources else ""
            table.add_row(row.role, str(row.processes), each, machines, row.note)
        return table

    def close(self) -> None:
        """Give the resources back. Roles that still run on them are ended by Ray."""
        for group in (self._groups or {}).values():
            release_bundles(group)
        self._groups, self._reserved = None, {}

    # ---------------------------------------------------------------- what each role is given

    @property
    def devices(self) -> int:
        """Ranks of a machine, for ``Trainer(devices=...)``; of several machines only with ``launcher="ray"``."""
        self.reserve()
        return self.num_ranks // self._num_nodes

    def ranks(self) -> dict[str, Any]:
        """Arguments of :class:`~rlhfkit.RLHFDeepSpeedStrategy` that start the ranks; empty where Ray does not."""
        self.reserve()
        if "trainer" not in self._reserved:
            return {}
        return {"launcher": "ray", "num_nodes": self._num_nodes, "resources_per_rank": self._reserved["trainer"]}

    def reference(self, model: str, **arguments: Any) -> ModelPool | None:
        """For :class:`~rlhfkit.modules.parts.kl_penalty.Reference`.

        Args:
            model: Folder or hub name.
            **arguments: Others of the pool.

        Returns:
            A :class:`~rlhfkit.ModelPool`; ``None`` with the trainer: the module makes a child of the model that it
            starts from.

        Raises:
            ValueError: If the plan lacks the role, or it is with the trainer and there are other arguments.
        """
        found = self._frozen("reference", model, arguments)
        return found if isinstance(found, ModelPool) else None

    def reward(self, model: str, **arguments: Any) -> ModelPool | str:
        """For :class:`~rlhfkit.modules.parts.reward_model.RewardModel`.

        Args:
            model: Folder or hub name.
            **arguments: Others of the pool.

        Returns:
            A :class:`~rlhfkit.ModelPool`; with the trainer the model's name, for a child.
        """
        return self._frozen("reward", model, arguments)

    def teacher(self, model: str, **arguments: Any) -> ModelPool | str:
        """For ``teacher=`` of a module, see :meth:`reward`."""
        return self._frozen("teacher", model, arguments)

    def critic(self, model: str, **arguments: Any) -> CriticPool | str:
        """For ``critic=`` of :class:`~rlhfkit.PPOModule`.

        Args:
            model: Folder or hub name of the initial model.
            **arguments: Others of the pool.

        Returns:
            A :class:`~rlhfkit.CriticPool`, whose ranks train it; with the trainer the model's name, for a child.
        """
        found = self._own_processes("critic", arguments)
        return model if found is None else CriticPool(model, num_ranks=found[0], resources=found[1], **arguments)

    def engines(self, **arguments: Any) -> VLLMPool:
        """For ``RolloutCallback(engine=...)``.

        Args:
            **arguments: Of :class:`~rlhfkit.VLLMPool`, but how many there are and their cores. Engines with the trainer
                share its GPUs (``colocate=True``).

        Raises:
            ValueError: If an engine has more processes than GPUs are held for each.
        """
        own, reserved = self._placed("engines"), self._reserved.get("engines")
        if isinstance(own, str):
            pool = VLLMPool(**({"num_engines": 1} | arguments), colocate=True, device=self.device)
            if "num_engines" not in arguments:
                pool.num_engines = max(1, self.num_ranks // pool.processes_per_engine)
            return pool
        if reserved is None:  # not rank 0, whose engines these are
            return VLLMPool(own.processes, device=self.device, **arguments)
        processes = VLLMPool(own.processes, device=self.device, **arguments).processes_per_engine
        gpus, cores = reserved.get("GPU", 0), reserved.get("CPU", 1)
        if self.device == "cuda" and gpus != processes:
            raise ValueError(
                f"an engine of these sizes has {processes} process(es) with a GPU each, and {gpus:g} GPU(s) are held "
                f"for each of {own.processes} engines: Placement(engines=RoleResources({own.processes}, "
                f"{{'GPU': {processes}}}))"
            )
        threads = max(1, int(cores) // (1 if self.device == "cuda" else processes))
        pool = VLLMPool(own.processes, device=self.device, **({"cpus_per_engine": threads} | arguments))
        pool.reserved = reserved
        return pool

    def _frozen(self, role: str, model: str, arguments: dict[str, Any]) -> ModelPool | str:
        found = self._own_processes(role, arguments)
        return model if found is None else ModelPool(model, num_replicas=found[0], resources=found[1], **arguments)

    def _own_processes(self, role: str, arguments: Mapping[str, Any]) -> tuple[int, Resources | None] | None:
        """How many processes a role has, with which resources each; ``None`` with the trainer.

        ``arguments`` are those of the pool that is made of it.
        """
        own = self._placed(role)
        if own == "trainer":
            if arguments:
                raise ValueError(
                    f"Placement({role}='{WITH}trainer') makes a child of the module, which takes no "
                    f"{', '.join(sorted(arguments))}: leave that out, or give the {role} processes of its own"
                )
            return None
        decided = sorted({"num_replicas", "num_ranks", "resources"} & set(arguments))
        if decided:
            raise ValueError(
                f"Placement({role}=...) decides {', '.join(decided)}: leave it out, or say it in the plan with "
                f"Placement({role}=RoleResources(...))"
            )
        own = self._own[own] if isinstance(own, str) else own
        return own.processes, self._reserved.get(role, own.resources)

    def _placed(self, role: str) -> RoleResources | str:
        """Hold everything, and return what a role has asked for."""
        if role not in self.roles:
            raise ValueError(
                f"the plan has no {role}: give Placement({role}=...) a number of processes, or 'with trainer'"
            )
        self.reserve()
        return self.roles[role]


def checked_roles(given: Mapping[str, RoleRequest | None]) -> dict[str, RoleResources | str]:
    """The processes of each role, or the name of the role whose resources it shares; those that are ``None`` left out.

    Raises:
        TypeError: If a request is none of the kinds that are allowed.
        ValueError: If a number is out of range, or a role shares one that it cannot.
    """
    roles = {role: _checked(role, value) for role, value in given.items() if value is not None}
    placed = [role for role, own in roles.items() if isinstance(own, RoleResources)]
    for role, host in roles.items():
        if isinstance(host, RoleResources):
            continue
        if role == "trainer":
            raise ValueError("Placement(trainer=...) takes a number of ranks: other roles may be with the trainer")
        others = [] if role == "engines" else [name for name in placed if name not in ("trainer", "engines")]
        if host not in ("trainer", *others):
            raise ValueError(
                f"Placement({role}='with {host}'): {role} can be with {' or '.join(['trainer', *others])}. Engines "
                "share GPUs with the trainer only, and a role that shares another's resources cannot be shared in turn"
            )
    return roles


def _checked(role: str, value: RoleRequest) -> RoleResources | str:
    if isinstance(value, str):
        if not value.startswith(WITH):
            raise ValueError(f"Placement({role}=...) takes a number of processes or 'with trainer', got {value!r}")
        return value.removeprefix(WITH)
    if isinstance(value, RoleResources):
        return value
    if isinstance(value, Mapping):
        try:
            return RoleResources(**value)
        except TypeError as error:
            raise TypeError(
                f"Placement({role}=...) as a mapping takes processes, resources and machines, got {dict(value)}"
            ) from error
    check_integer(f"Placement.{role}", value, minimum=1, why="leave a role out that the run does not have")
    return RoleResources(int(value))


def check_totals(processes: Mapping[str, int], each: Mapping[str, Resources], machines: Sequence[Machine]) -> None:
    """Raise PlacementError if the cluster, or its largest machine, could not hold the plan even if it were idle."""
    for name in sorted({name for role in processes for name in each[role]}, key=lambda name: name != "GPU"):
        needs = {role: count * each[role][name] for role, count in processes.items() if each[role].get(name)}
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


def _gpus_that_ray_counts_here() -> bool:
    import ray

    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node["Resources"].get("GPU") for node in ray.nodes())


def _is_first_process() -> bool:
    """Whether this process is rank 0 of a script, torchrun or Slurm, or their only one."""
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)
