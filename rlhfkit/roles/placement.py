"""``Placement``: where each role of a run is, in words; resources for all are held and shown before anything starts."""

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlhfkit.ray_placement import (
    PlacementError,
    ReservedResources,
    Resources,
    cluster_machines,
    fewest_machines,
    text,
)
from rlhfkit.ray_session import join_or_start_ray
from rlhfkit.roles.critic_pool import CriticPool
from rlhfkit.roles.model_pool import ModelPool
from rlhfkit.roles.placement_plan import (
    WITH,
    PlannedRole,
    Requests,
    ReservedPlan,
    RoleRequest,
    RoleResources,
    default_resources,
)
from rlhfkit.rollout.remote.placement import RankLocation, start_ray_for_engines, visible_gpus
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.validation import check_number

if TYPE_CHECKING:
    from rich.table import Table

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK", "GROUP_RANK")


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
        roles = {"engines": engines, "reference": reference, "reward": reward, "teacher": teacher, "critic": critic}
        if trainer is None:
            raise TypeError("Placement(trainer=...) takes a number of ranks or RoleResources, got None")
        self.requests = Requests.parse(trainer=trainer, **roles)
        if launcher not in (None, "ray"):
            raise ValueError(f"Placement.launcher must be 'ray' or None, got {launcher!r}")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"Placement.device must be 'cpu', 'cuda' or None, got {device!r}")
        check_number("Placement.timeout", timeout, above=0, why="it is in seconds")
        own = self.requests.roles["trainer"].own
        assert own is not None
        self.num_ranks = own.processes
        self.launcher = launcher
        self.device = device
        self.timeout = timeout
        self.plan: list[PlannedRole] = []
        """The roles and their machines, after :meth:`reserve`."""
        self._num_nodes = 1
        self._each: dict[str, Resources] = {}
        self._reserved: ReservedPlan | None = None

    # ---------------------------------------------------------------- the plan

    def reserve(self) -> None:
        """Hold the resources of all roles and print the plan, once.

        Does nothing on ranks other than 0.

        Raises:
            PlacementError: If the cluster has no room. It says what is missing and what there is.
        """
        if self._reserved is not None or not _is_first_process():
            return
        gpus = self._start_ray() if self._needs_ray() else self._uses_gpus(bool(visible_gpus()))
        own = {name: one.own for name, one in self.requests.roles.items() if one.own is not None}
        self._each = {name: default_resources(role, gpus) for name, role in own.items()}
        if self.launcher == "ray":
            need = {name: self.num_ranks * amount for name, amount in self._each["trainer"].items()}
            self._num_nodes = fewest_machines(self.num_ranks, need, [one.total for one in cluster_machines()]) or 1
        machines = self._num_nodes if self.launcher == "ray" else None
        try:
            self._reserved = ReservedPlan(self.requests, self._each, machines, self.timeout)
        except BaseException:
            self.close()
            raise
        self.plan = [self._planned(role) for role in self.requests.roles]
        from rich.console import Console

        Console().print(self.table(), highlight=False)

    def _needs_ray(self) -> bool:
        """Whether Ray places any role: not if all are with ranks that it does not start."""
        own = [name for name, one in self.requests.roles.items() if one.own is not None]
        return self.launcher == "ray" or own != ["trainer"]

    def _start_ray(self) -> bool:
        """Join or start Ray, without the GPUs of ranks that it does not start; returns whether GPUs are used."""
        import ray

        cores = sum(
            int(one.own.processes * (one.own.resources or {}).get("CPU", 1))
            for one in self.requests.roles.values()
            if one.own is not None
        )
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

    def _planned(self, role: str) -> PlannedRole:
        request, reserved = self.requests.roles[role], self._reserved
        assert reserved is not None
        if request.own is not None and role in reserved.reserved:
            return PlannedRole(role, request.own.processes, self._each[role], reserved.machines_of(role))
        if role == "trainer":
            gpu = {"GPU": 1.0} if self.device == "cuda" else {"CPU": 1.0}
            return PlannedRole(role, self.num_ranks, gpu, {socket.gethostname(): self.num_ranks}, "not started by Ray")
        host = str(request.shares)
        if host == "trainer":
            count = self.num_ranks
            note = "on the ranks' devices" if role == "engines" else "in the ranks"
            return PlannedRole(role, count, {}, {}, f"{WITH}trainer: {note}")
        part = reserved.reserved[role]
        return PlannedRole(role, len(part.bundles), part, reserved.machines_of(host), f"{WITH}{host}: a part of each")

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
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    # ---------------------------------------------------------------- what each role is given

    @property
    def devices(self) -> int:
        """Ranks of a machine, for ``Trainer(devices=...)``; of several machines only with ``launcher="ray"``."""
        self.reserve()
        return self.num_ranks // self._num_nodes

    def ranks(self) -> dict[str, Any]:
        """Arguments of :class:`~rlhfkit.RLHFDeepSpeedStrategy` that start the ranks; empty where Ray does not."""
        self.reserve()
        if self.launcher != "ray" or self._reserved is None:
            return {}
        resources = self._reserved.reserved["trainer"]
        return {"launcher": "ray", "num_nodes": self._num_nodes, "resources_per_rank": resources}

    def reference(self, model: str, **arguments: Any) -> ModelPool | None:
        """For :class:`~rlhfkit.modules.parts.reference.Reference`.

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
        reserved = self._placed("engines")
        own = self.requests.roles["engines"].own
        if own is None:
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
        reserved = self._placed(role)
        request = self.requests.roles[role]
        if request.shares == "trainer":
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
        host = self.requests.roles[str(request.shares)] if request.own is None else request
        assert host.own is not None
        return host.own.processes, host.own.resources if reserved is None else reserved

    def _placed(self, role: str) -> ReservedResources | None:
        """Hold everything, and return the resources of a role, if they are known here and its own."""
        if role not in self.requests.roles:
            raise ValueError(
                f"the plan has no {role}: give Placement({role}=...) a number of processes, or 'with trainer'"
            )
        self.reserve()
        return None if self._reserved is None else self._reserved.reserved.get(role)


def _gpus_that_ray_counts_here() -> bool:
    import ray

    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node["Resources"].get("GPU") for node in ray.nodes())


def _is_first_process() -> bool:
    """Whether this process is rank 0 of a script, torchrun or Slurm, or their only one."""
    return all(os.environ.get(name, "0") == "0" for name in _RANK_VARIABLES)
