"""``ModelPool``: a frozen model on machines of its own, in one or several Ray actors.

Training ranks keep the memory that the model would take, and it works while they compute something else. Every rank
sends its own rows to the replicas; nothing passes rank 0.
"""

import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhfkit.data.types import Experience
from rlhfkit.distributed import get_rank, get_world_size, run_on_all_ranks
from rlhfkit.ray_calls import ActorCalls, cause_of
from rlhfkit.ray_placement import ReservedResources, actor_options
from rlhfkit.ray_session import JoinedRay, join_or_start_ray, this_cluster
from rlhfkit.roles.frozen_model import EarlyRows, FrozenModel, ModelPoolError
from rlhfkit.roles.replica import READS, ModelReplica, ReplicaOptions, Role, TokenRows
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

NAMESPACE = "rlhfkit-models"
"""Ray's namespace of all replicas."""
_ASKED: dict[Role, str] = {"logprobs": "log-probs", "values": "values", "reward": "rewards"}
_STATUS = "status"
"""Ray's name for the calls that a replica answers while it computes."""
_POLL_SECONDS = 1.0
_STATUS_SECONDS = 10.0
"""Time in which a process that lives says when it has finished something."""
_COUNTING = threading.RLock()
"""Guards the replicas' counts of requests, as sampling threads ask too. Not a pool's attribute: pools are copied."""


class _Use(NamedTuple):
    """What replicas compute."""

    role: Role
    weights: torch.dtype
    compute: torch.dtype

    def __str__(self) -> str:
        return f"{_ASKED[self.role]} (weights {self.weights}, computed in {self.compute})"


class Replica:
    """One replica, as this rank sees it; ``actor`` is its handle in Ray."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.tokens = 0
        """Of requests that are not finished."""
        self.last_finished = 0.0
        self.lost = ""
        """Why it gets no more requests."""

    def works(self, limit: float) -> bool:
        """Whether it has finished a request of any rank in the last ``limit`` seconds, and answers at all."""
        import ray

        try:
            asked = self.actor.idle_seconds.options(max_task_retries=0).remote()
            idle: float = ray.get(asked, timeout=min(limit, _STATUS_SECONDS))
        except ray.exceptions.RayError:
            return False
        self.last_finished = max(self.last_finished, time.monotonic() - idle)
        return idle <= limit


class ModelPool(FrozenModel):
    """A frozen language model, reward model or critic in Ray actors.

    Replicas share the requests by tokens. One that dies is started again by Ray, and what it was asked is repeated; one
    that finishes nothing for ``request_timeout`` gets no more requests, and the others get its own. The numbers are
    those of the model as a child of the module: same forward pass, same types.

    Example::

        GRPOModule("sft", kl_coef=0.01, parts=[Reference(ModelPool("sft", resources={"GPU": 1}))])

    Args:
        model: Folder or hub name, as the replicas' machines see it.
        num_replicas: How many replicas there are, each with the whole model.
        resources: Ray resources of each replica: ``{"GPU": 1}``, ``{"CPU": 2}``, or your own; ``None``: the CPU of any
            machine, which is not counted. Of several GPUs each has an equal number of the model's layers.
        attention: As in :class:`~rlhfkit.modules.PolicyModule`; ``None``: packed where the model can be packed.
        trust_remote_code: Run Python code that comes with the model.
        reads: What a reward model reads. ``tokens``: the policy's, which must be its own. A model with another
            tokenizer: ``chat``, prompt and answer, decoded without special tokens, as two turns in its own chat
            template; ``text``, both as one text; or the dotted name of a function of both that returns the text. The
            replicas' machines need the policy's tokenizer too, under the policy's name.
        start_timeout: Seconds in which all replicas must be placed and have loaded the model.
        request_timeout: Seconds in which a replica with requests must finish one, of any rank and of at most the
            ``ModelLoading.max_tokens_per_forward`` tokens.
        max_restarts: How often each replica is started again.

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
        reads: str = "tokens",
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
        if reads not in READS and "." not in reads:
            raise ValueError(f"reads must be one of {', '.join(READS)} or the dotted name of a function, got {reads!r}")
        super().__init__(model)
        self.reads = reads
        self.num_replicas = num_replicas
        # Resources that a Placement holds know where they are, which a copy would not.
        keeps = resources is None or isinstance(resources, ReservedResources)
        self.resources = resources if keeps else dict(resources or {})
        self.attention = attention
        self.trust_remote_code = trust_remote_code
        self.start_timeout = start_timeout
        self.request_timeout = request_timeout
        self.max_restarts = max_restarts
        self._replicas: list[Replica] = []
        self._use: _Use | None = None  # of the replicas that were started last
        self._owned: list[Any] = []  # actors, on rank 0
        self._joined: JoinedRay | None = None
        self.computed: dict[str, float] = {}
        """Seconds of computing for this rank, by replica, since :meth:`take_seconds`."""
        self._counted = 0.0  # of ``waited``, when the seconds were taken

    # ---------------------------------------------------------------- replicas

    @property
    def started(self) -> bool:
        return bool(self._replicas)

    def start(self, role: Role, *, weights: torch.dtype, compute: torch.dtype, policy: Any = "") -> None:
        """Start the replicas, once; they are of this rank and of all others. A collective.

        Args:
            role: What the model is asked for.
            weights: Type of the weights.
            compute: Type of matrix products, by autocast if it is another.
            policy: Folder or hub name of the policy, whose tokens are turned into text unless the model reads them, or
                a tokenizer that it has in place of its own.

        Raises:
            ModelPoolError: On all ranks, if the replicas were not ready in time.
            ValueError: If they were started for another role, or with other types.
        """
        if self.started:
            self._check_use(_Use(role, weights, compute))
            return
        if role != "reward" and self.reads != "tokens":
            raise ValueError(f"reads={self.reads!r} is for reward models, and {self.model} is asked for {_ASKED[role]}")
        options = ReplicaOptions(
            self.model, role, weights, compute, self.attention, self.trust_remote_code, self.reads, policy
        )
        self._use = _Use(role, weights, compute)
        prefix = f"{role}-{uuid.uuid4().hex[:8]}"

        def create() -> Any:
            return self._create(options, prefix) if get_rank() == 0 else None

        cluster, names = run_on_all_ranks(create, error_type=ModelPoolError)[0]

        def join() -> None:
            if get_rank() > 0:
                self._joined = JoinedRay(cluster, member=f"rank {get_rank()}")
            self._replicas = [Replica(name, _actor(name)) for name in names]

        try:
            run_on_all_ranks(join, error_type=ModelPoolError)
        except BaseException:
            self.close()
            raise

    def _check_use(self, use: _Use) -> None:
        if self._use is not None and use != self._use:
            raise ValueError(
                f"the replicas of {self.model} were started for {self._use}, and are asked for {use}: give each a "
                "ModelPool of its own"
            )

    def _create(self, options: ReplicaOptions, prefix: str) -> Any:
        import ray

        join_or_start_ray(object_store_memory=256 * 2**20)
        if isinstance(self.resources, ReservedResources):
            self.resources.check_processes(self.num_replicas, f"replica(s) of {self.model}")
        kept = {"max_restarts": self.max_restarts, "max_task_retries": -1}  # nothing is kept between two requests
        # So that a replica says when it has finished something while it computes the next.
        ray.method(concurrency_group=_STATUS)(ModelReplica.idle_seconds)
        replica = ray.remote(concurrency_groups={_STATUS: 1})(ModelReplica)
        names = [f"{prefix}-{number}" for number in range(self.num_replicas)]
        for number, name in enumerate(names):
            named = {"name": name, "namespace": NAMESPACE} | kept
            self._owned.append(replica.options(**actor_options(self.resources, number), **named).remote(options))
        try:
            self._wait_until_loaded()
        except BaseException:
            self.close()
            raise
        log.info("%d replica(s) of %s are ready", self.num_replicas, self.model)
        return this_cluster(), names

    def _wait_until_loaded(self) -> None:
        """Load the model in all replicas; ModelPoolError as soon as one fails, or when the time is up."""
        _Loading(self, {actor.load.remote(): "a replica" for actor in self._owned}).result()

    def close(self) -> None:
        """End the replicas; :meth:`start` may be called again."""
        import ray

        for actor in self._owned:
            if ray.is_initialized():
                ray.kill(actor, no_restart=True)
        if self._joined is not None:
            self._joined.close()
        self._replicas, self._owned, self._joined, self.early = [], [], None, EarlyRows()

    # ---------------------------------------------------------------- requests

    def take_seconds(self) -> tuple[float, float]:
        """Seconds since the last call that this rank has waited, and that were hidden from it.

        Hidden is what the busiest replica has computed for it beyond that: had it asked for everything when it needed
        the first result, it would have waited for both.
        """
        waited, computed = self.waited - self._counted, max(self.computed.values(), default=0.0)
        hidden = max(0.0, computed - waited)
        self._counted, self.computed = self.waited, {}
        self.hidden += hidden
        return waited, hidden

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> "PendingRows":
        """Ask for some rows of an iteration; returns at once. Any thread may.

        Args:
            experience: B sequences of this rank.
            batches: Indices (b,) of the rows of each forward pass.
        """
        return PendingRows(self, experience, batches)


class PendingRows:
    """Rows that replicas are computing: ``batches`` of an experience, one request each."""

    def __init__(self, pool: ModelPool, experience: Experience, batches: Sequence[Tensor]) -> None:
        self._pool = pool
        self._shape = experience.action_mask.shape
        self._requests = {number: TokenRows.of(experience, rows, pool.top) for number, rows in enumerate(batches)}
        self._rows = list(batches)
        self._running: dict[Any, tuple[int, Replica]] = {}
        self._found: dict[int, Tensor] = {}
        self._failure: ModelPoolError | None = None  # of a thread that asked; raised where it is waited for
        try:
            for number in self._requests:
                self._send(number)
        except ModelPoolError as error:
            self._failure = error

    def _send(self, number: int) -> None:
        """Give a request to the replica with the fewest tokens to compute; ranks begin at different ones."""
        pool = self._pool
        with _COUNTING:
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
            rows = self._requests[number]
            replica.tokens += int(rows.lengths.sum())
            self._running[replica.actor.compute.remote(rows)] = (number, replica)

    def result(self, columns: int | None = None) -> Tensor:
        """Wait for all of them.

        Args:
            columns: Numbers of each row; ``None``: T-1, log-probs.

        Returns:
            (B, T-1), (B, T-1, 2 K) of a pool with ``top``, or (B, columns) float32 on the CPU; 0 in rows that were not
            asked for.

        Raises:
            ModelPoolError: If no replica is left, or the model cannot compute them.
        """
        if self._failure is not None:
            raise self._failure
        started = time.monotonic()
        for _, replica in self._running.values():  # nobody has looked at what it finished while others were computing
            replica.last_finished = max(replica.last_finished, started)
        while self._running:
            self._take(_POLL_SECONDS)
            self._check_progress()
        self._pool.waited += time.monotonic() - started
        last = () if columns is not None or not self._pool.top else (2 * self._pool.top,)
        values = torch.zeros(self._shape[0], self._shape[1] if columns is None else columns, *last)
        for number, found in self._found.items():
            values[self._rows[number], : found.shape[1]] = found
        return values

    def _forget(self, ref: Any) -> tuple[int, Replica]:
        """Take a request off its replica."""
        number, replica = self._running.pop(ref)
        with _COUNTING:
            replica.tokens -= int(self._requests[number].lengths.sum())
        return number, replica

    def _take(self, timeout: float) -> None:
        """Take the results that are ready, after waiting for one of them."""
        import ray

        running = list(self._running)
        ready, _ = ray.wait(running, num_returns=1, timeout=timeout)
        if ready:  # all that are, so that no replica seems to have finished nothing
            ready, _ = ray.wait(running, num_returns=len(running), timeout=0)
        for ref in ready:
            number, replica = self._forget(ref)
            try:
                answer = ray.get(ref)
            except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError) as error:
                self._give_up(replica, cause_of(error))
                self._send(number)
                continue
            except ray.exceptions.RayError as error:
                raise ModelPoolError(
                    f"{replica.name} could not compute {self._pool.model}: {cause_of(error)}"
                ) from error
            replica.last_finished = time.monotonic()
            self._found[number] = answer.values
            self._pool.computed[replica.name] = self._pool.computed.get(replica.name, 0.0) + answer.seconds

    def _check_progress(self) -> None:
        """Send what a stuck replica has to others."""
        limit = self._pool.request_timeout
        for replica in {id(one): one for _, one in self._running.values()}.values():
            # It may be computing what other ranks have asked for before.
            stuck = time.monotonic() - replica.last_finished > limit and not replica.works(limit)
            if stuck:
                self._give_up(replica, f"it finished nothing for {limit:g} s")
            if stuck or replica.lost:
                for ref in [ref for ref, (_, one) in self._running.items() if one is replica]:
                    self._send(self._forget(ref)[0])

    def _give_up(self, replica: Replica, reason: str) -> None:
        if not replica.lost:
            log.warning("replica %s of %s gets no more requests: %s", replica.name, self._pool.model, reason)
        replica.lost = replica.lost or reason


class _Loading(ActorCalls[str]):
    """Replicas that load their model."""

    def __init__(self, pool: ModelPool, calls: Mapping[Any, str]) -> None:
        super().__init__(calls, f"loading {pool.model}", pool.start_timeout, ModelPoolError)
        self._pool = pool

    def failed(self, actor: str, error: Exception) -> Exception:
        return ModelPoolError(f"{actor} could not load {self._pool.model}: {cause_of(error)}")

    def late(self, actors: Sequence[str]) -> Exception:
        pool = self._pool
        return ModelPoolError(
            f"{len(actors)} of {pool.num_replicas} replica(s) of {pool.model} were not ready within "
            f"{pool.start_timeout:g} s: Ray could not place them ({pool.resources or 'any CPU'} each; free are "
            f"{_free(pool.resources)}), or the model takes longer to load"
        )


def _actor(name: str) -> Any:
    import ray

    return ray.get_actor(name, namespace=NAMESPACE)


def _free(resources: Mapping[str, float] | None) -> dict[str, float]:
    import ray

    free = ray.available_resources()
    return {name: free.get(name, 0.0) for name in resources or {"CPU": 0}}
