"""``ModelPool``: a frozen model on machines of its own, in one or several Ray actors.

Training ranks keep the memory that the model would take, and it works while they compute something else. Every rank
sends its own rows to the replicas; nothing passes rank 0.
"""

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import get_rank, get_world_size, run_on_all_ranks
from rlhfkit.ray_resources import ReservedResources, actor_options
from rlhfkit.ray_session import JoinedRay, join_or_start_ray, this_cluster
from rlhfkit.roles.replica import ModelReplica, ReplicaOptions, Role, TokenRows
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

NAMESPACE = "rlhfkit-models"
"""Ray's namespace of all replicas."""
_POLL_SECONDS = 1.0


class ModelPoolError(RuntimeError):
    """No replica is left, or none answered in time."""


class ModelPool:
    """A frozen language model (``GRPOModule(reference=...)``) or reward model in Ray actors.

    Replicas share the requests by tokens. One that dies is started again by Ray, and what it was asked is repeated; one
    that finishes nothing for ``request_timeout`` gets no more requests, and the others get its own. The numbers are
    those of the model as a child of the module: same forward pass, same types.

    Example::

        GRPOModule("sft", kl_coef=0.01, reference=ModelPool("sft", num_replicas=2, resources={"GPU": 1}))

    Args:
        model: Folder or hub name, as the replicas' machines see it.
        num_replicas: Ray actors with the whole model each.
        resources: Ray resources of each: ``{"GPU": 1}``, ``{"CPU": 2}``, or your own; ``None``: the CPU of any machine,
            which is not counted.
        attention: See :class:`~rlhfkit.modules.PolicyModule`.
        trust_remote_code: Run Python code that comes with the model.
        start_timeout: Seconds in which all replicas must be placed and have loaded the model.
        request_timeout: Seconds in which a replica with requests must finish one, of at most the module's
            ``max_tokens_per_forward`` tokens.
        max_restarts: How often Ray starts each replica again.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        num_replicas: int = 1,
        resources: Mapping[str, float] | None = None,
        attention: str | None = None,
        trust_remote_code: bool = False,
        start_timeout: float = 600.0,
        request_timeout: float = 600.0,
        max_restarts: int = 3,
    ) -> None:
        check_integer("num_replicas", num_replicas, minimum=1)
        for name, amount in (resources or {}).items():
            check_number(f"resources[{name!r}]", amount, minimum=0)
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        check_number("request_timeout", request_timeout, above=0, why="it is in seconds")
        check_integer("max_restarts", max_restarts, minimum=0)
        self.model = model
        self.num_replicas = num_replicas
        # Resources that a Placement holds know where they are, which a copy would not.
        keeps = resources is None or isinstance(resources, ReservedResources)
        self.resources = resources if keeps else dict(resources or {})
        self.attention = attention
        self.trust_remote_code = trust_remote_code
        self.start_timeout = start_timeout
        self.request_timeout = request_timeout
        self.max_restarts = max_restarts
        self._replicas: list[_Replica] = []
        self._owned: list[Any] = []  # actors, on rank 0
        self._joined: JoinedRay | None = None
        self.waited = 0.0
        """Seconds that this rank has waited for results: what the pool did not hide behind other work."""

    @classmethod
    def of(cls, value: "ModelPool | Mapping[str, Any] | None") -> "ModelPool | None":
        """Restore from the dictionary of :meth:`plain`; a pool or ``None`` is returned as it is."""
        return value if value is None or isinstance(value, cls) else cls(**value)  # type: ignore[arg-type]

    def plain(self) -> dict[str, Any]:
        """The arguments as plain values, for checkpoints and logs."""
        names = ("num_replicas", "resources", "attention", "trust_remote_code")
        times = ("start_timeout", "request_timeout", "max_restarts")
        plain = {"model": self.model} | {name: getattr(self, name) for name in (*names, *times)}
        return plain | {"resources": None if self.resources is None else dict(self.resources)}

    # ---------------------------------------------------------------- replicas

    @property
    def started(self) -> bool:
        """Whether there are replicas."""
        return bool(self._replicas)

    def start(self, role: Role, *, weights: torch.dtype, compute: torch.dtype) -> None:
        """Start the replicas, once; they are of this rank and of all others. A collective.

        Args:
            role: What the model is asked for.
            weights: Type of the weights.
            compute: Type of matrix products, by autocast if it is another.

        Raises:
            ModelPoolError: On all ranks, if the replicas were not ready in time.
        """
        if self.started:
            return
        options = ReplicaOptions(self.model, role, weights, compute, self.attention, self.trust_remote_code)
        prefix = f"{role}-{uuid.uuid4().hex[:8]}"

        def create() -> Any:
            return self._create(options, prefix) if get_rank() == 0 else None

        cluster, names = run_on_all_ranks(create, error_type=ModelPoolError)[0]

        def join() -> None:
            if get_rank() > 0:
                self._joined = JoinedRay(cluster, member=f"rank {get_rank()}")
            self._replicas = [_Replica(name, _actor(name)) for name in names]

        run_on_all_ranks(join, error_type=ModelPoolError)

    def _create(self, options: ReplicaOptions, prefix: str) -> Any:
        import ray

        join_or_start_ray(object_store_memory=256 * 2**20)
        if isinstance(self.resources, ReservedResources):
            self.resources.check_processes(self.num_replicas, f"replica(s) of {self.model}")
        kept = {"max_restarts": self.max_restarts, "max_task_retries": -1}  # nothing is kept between two requests
        names = [f"{prefix}-{number}" for number in range(self.num_replicas)]
        for number, name in enumerate(names):
            placed = actor_options(self.resources, number) | {"name": name, "namespace": NAMESPACE}
            self._owned.append(ray.remote(ModelReplica).options(**placed, **kept).remote(options))
        loading = [actor.load.remote() for actor in self._owned]
        ready, late = ray.wait(loading, num_returns=len(loading), timeout=self.start_timeout)
        try:
            if late:
                raise ModelPoolError(
                    f"{len(late)} of {self.num_replicas} replica(s) of {self.model} were not ready within "
                    f"{self.start_timeout:g} s: Ray could not place them ({self.resources or 'any CPU'} "
                    f"each; free are {_free(self.resources)}), or the model takes longer to load"
                )
            ray.get(ready)
        except ray.exceptions.RayError as error:
            self.close()
            raise ModelPoolError(f"a replica could not load {self.model}: {_cause(error)}") from error
        except ModelPoolError:
            self.close()
            raise
        log.info("%d replica(s) of %s are ready", self.num_replicas, self.model)
        return this_cluster(), names

    def close(self) -> None:
        """End the replicas; :meth:`start` may be called again."""
        import ray

        for actor in self._owned:
            if ray.is_initialized():
                ray.kill(actor, no_restart=True)
        if self._joined is not None:
            self._joined.close()
        self._replicas, self._owned, self._joined = [], [], None

    # ---------------------------------------------------------------- requests

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> "PendingRows":
        """Ask for some rows of an iteration; returns at once.

        Args:
            experience: B sequences of this rank.
            batches: Indices (b,) of the rows of each forward pass.
        """
        return PendingRows(self, experience, batches)


class _Replica:
    """One replica, as this rank sees it."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.tokens = 0
        """Of requests that are not finished."""
        self.last_finished = 0.0
        self.lost = ""
        """Why it gets no more requests."""


class PendingRows:
    """Rows that replicas are computing."""

    def __init__(self, pool: ModelPool, experience: Experience, batches: Sequence[Tensor]) -> None:
        self._pool = pool
        self._shape = experience.action_mask.shape
        self._requests = {number: TokenRows.of(experience, rows) for number, rows in enumerate(batches)}
        self._rows = list(batches)
        self._running: dict[Any, tuple[int, _Replica]] = {}
        for number in self._requests:
            self._send(number)

    def _send(self, number: int) -> None:
        """Give a request to the replica with the fewest tokens to compute; ranks begin at different ones."""
        pool, rows = self._pool, self._requests[number]
        left = [replica for replica in pool._replicas if not replica.lost]
        if not left:
            reasons = "; ".join(f"{replica.name}: {replica.lost}" for replica in pool._replicas)
            raise ModelPoolError(
                f"no replica of {pool.model} is left ({reasons}). The run can be resumed from its last checkpoint"
            )
        start = get_rank() * len(left) // get_world_size()
        replica = min(left[start:] + left[:start], key=lambda replica: replica.tokens)
        if not replica.tokens:
            replica.last_finished = time.monotonic()
        replica.tokens += int(rows.lengths.sum())
        self._running[replica.actor.compute.remote(rows)] = (number, replica)

    def result(self, columns: int | None = None) -> Tensor:
        """Wait for all of them.

        Args:
            columns: Numbers of each row; ``None``: T-1, log-probs.

        Returns:
            (B, T-1) or (B, columns) float32 on the CPU; 0 in rows that were not asked for.

        Raises:
            ModelPoolError: If no replica is left, or the model cannot compute them.
        """
        import ray

        started = time.monotonic()
        values = torch.zeros(self._shape[0], self._shape[1] if columns is None else columns)
        while self._running:
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
            for ref in done:
                number, replica = self._running.pop(ref)
                replica.tokens -= int(self._requests[number].lengths.sum())
                try:
                    found = ray.get(ref)
                except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError) as error:
                    self._give_up(replica, _cause(error))
                    self._send(number)
                    continue
                except ray.exceptions.RayError as error:
                    raise ModelPoolError(
                        f"{replica.name} could not compute {self._pool.model}: {_cause(error)}"
                    ) from error
                replica.last_finished = time.monotonic()
                values[self._rows[number], : found.shape[1]] = found
            self._check_progress()
        self._pool.waited += time.monotonic() - started
        return values

    def _check_progress(self) -> None:
        """Send what a stuck replica has to others."""
        for replica in {id(one): one for _, one in self._running.values()}.values():
            if time.monotonic() - replica.last_finished > self._pool.request_timeout:
                self._give_up(replica, f"it finished nothing for {self._pool.request_timeout:g} s")
                for ref in [ref for ref, (_, one) in self._running.items() if one is replica]:
                    number, _ = self._running.pop(ref)
                    self._send(number)

    def _give_up(self, replica: _Replica, reason: str) -> None:
        if not replica.lost:
            log.warning("replica %s of %s gets no more requests: %s", replica.name, self._pool.model, reason)
        replica.lost, replica.tokens = reason, 0


def _actor(name: str) -> Any:
    import ray

    return ray.get_actor(name, namespace=NAMESPACE)


def _free(resources: Mapping[str, float] | None) -> dict[str, float]:
    import ray

    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in resources or {"CPU": 0}}


def _cause(error: Exception) -> str:
    """The last line of an error of Ray's, which holds the remote traceback."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
