"""``CriticPool``: a critic that is trained by ranks of its own, on machines of their own, while the policy learns.

Its ranks are Ray actors that rank 0 of training starts; a desk (:mod:`rlhfkit.roles.critic_desk`) passes requests to
them. Every training rank sends its own rows.
"""

import copy
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from rlhfkit.data.types import Experience
from rlhfkit.distributed import get_rank, get_world_size, run_on_all_ranks
from rlhfkit.parts import Configured
from rlhfkit.protocols import StartsRanksOnRay
from rlhfkit.ray_calls import first_lines_of
from rlhfkit.ray_placement import ReservedResources, check_whole_gpus
from rlhfkit.ray_session import JoinedRay, join_or_start_ray, this_cluster
from rlhfkit.roles import critic_desk
from rlhfkit.roles.critic_rank import CriticRun, run_rank
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

STRATEGIES = (*(f"rlhf_zero{stage}" for stage in range(4)), *(f"rlhf_zero{stage}_offload" for stage in (1, 2, 3)))
"""Names of the strategies that can train a critic, which are registered where DeepSpeed is installed."""
NAMESPACE = "rlhfkit-critics"
"""Ray's namespace of all desks."""
_POLL_SECONDS = 1.0
_STOP_SECONDS = 60.0
_REPORT_SECONDS = 15.0
"""Time for the error of ranks that could not be placed to arrive, on a busy machine."""


class CriticPoolError(RuntimeError):
    """The critic's ranks have failed, or did not answer in time."""


class CriticPool(Configured):
    """A critic with training ranks of its own: ``PPOModule(critic=CriticPool(...))``.

    Values and updates are computed while the policy is updated. The critic has its own engine, optimizer and schedule,
    and is saved with the policy's checkpoints. Losses, steps and clipping are those of a critic in the module.

    Example::

        PPOModule("sft", critic=CriticPool("reward-model", num_ranks=2, strategy="rlhf_zero2", resources={"GPU": 1}))

    Args:
        model: Folder or hub name of the initial model, as for ``PPOModule(critic=...)``; a picklable function that
            makes it; or ``None``: the policy's.
        num_ranks: Ranks that train it, whatever the number of the policy's ranks.
        num_nodes: Machines that the ranks are on; a Placement has chosen them already.
        strategy: Name of the strategy: ``"rlhf_zero0"`` to ``"rlhf_zero3"``, and those with ``_offload``.
        strategy_arguments: More arguments of :class:`~rlhfkit.strategies.RLHFDeepSpeedStrategy`.
        resources: Ray resources of each rank: ``{"GPU": 1}``, ``{"CPU": 2}``, or your own; ``None``: the CPU of any
            machine, which is not counted.
        precision: As ``Trainer(precision=...)``; ``None``: that of the Trainer.
        optimizer: Name of an optimizer, as in :class:`~rlhfkit.modules.PolicyModule`; ``None``: the module's. The
            learning rate is ``PPOModule(critic_lr=...)``, and other settings are the module's.
        optimizer_arguments: Keyword arguments of ``optimizer``.
        start_timeout: Seconds in which all ranks must be placed and have loaded the model.
        request_timeout: Seconds in which ranks that have been asked for something must finish something: the values or
            the training of a micro-batch, a checkpoint.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: str | Callable[[], nn.Module] | None = None,
        *,
        num_ranks: int = 1,
        num_nodes: int = 1,
        strategy: str = "rlhf_zero2",
        strategy_arguments: Mapping[str, Any] | None = None,
        resources: Mapping[str, float] | None = None,
        precision: Any = None,
        optimizer: str | None = None,
        optimizer_arguments: Mapping[str, Any] | None = None,
        start_timeout: float = 600.0,
        request_timeout: float = 600.0,
    ) -> None:
        check_integer("num_ranks", num_ranks, minimum=1)
        check_integer("num_nodes", num_nodes, minimum=1, maximum=num_ranks, why="each machine has a rank")
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        if optimizer is not None and not isinstance(optimizer, str):
            raise TypeError(f"optimizer must be a name, as in 'adamw' or 'sgd', got {optimizer!r}")
        if optimizer_arguments and optimizer is None:
            raise ValueError("optimizer_arguments need an optimizer: name it, as in optimizer='sgd'")
        for name, amount in (resources or {}).items():
            check_number(f"resources[{name!r}]", amount, above=0)
        if isinstance(resources, ReservedResources) and num_nodes > 1:
            raise ValueError(
                f"num_nodes={num_nodes}: a Placement has chosen the machines of the critic's ranks: leave it out, or "
                "plan with Placement(critic=RoleResources(..., machines='spread'))"
            )
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        check_number("request_timeout", request_timeout, above=0, why="it is in seconds")
        self.model = model
        self.num_ranks = num_ranks
        self.num_nodes = num_nodes
        self.strategy = strategy
        self.strategy_arguments = dict(strategy_arguments or {})
        # Resources that a Placement holds know where they are, which a copy would not.
        keeps = resources is None or isinstance(resources, ReservedResources)
        self.resources = resources if keeps else dict(resources or {})
        self.precision = precision
        self.optimizer = optimizer
        self.optimizer_arguments = dict(optimizer_arguments or {})
        self.start_timeout = start_timeout
        self.request_timeout = request_timeout
        self.waited = 0.0
        """Seconds that this rank has waited for answers: what was not hidden behind the policy's update."""
        self.trained = False
        """Whether its ranks have been sent micro-batches since they started; on all training ranks."""
        self.weights: Mapping[str, Tensor] | None = None
        """After a fit, on rank 0: the trained weights, if they have at most 8 GB."""
        self.processes: list[tuple[str, int]] = []
        """Host name and process id of each of the critic's ranks."""
        self._desk: Any = None
        self._sent = 0  # messages of this rank
        self._ranks: _Ranks | None = None  # on rank 0
        self._joined: JoinedRay | None = None

    def plain(self) -> dict[str, Any]:
        """See :class:`~rlhfkit.parts.Configured`; a function that makes the model is left out."""
        named = copy.copy(self)
        named.model = self.model if isinstance(self.model, str) else None
        return super(CriticPool, named).plain()

    # ---------------------------------------------------------------- the critic's ranks

    @property
    def started(self) -> bool:
        return self._desk is not None

    def start(self, run: CriticRun) -> None:
        """Start the critic's ranks; returns when they have loaded the model. A collective.

        Strategy, machines and device of ``run`` are replaced by those of this pool.

        Raises:
            CriticPoolError: On all ranks, if they were not ready in time.
        """
        self.close()
        name = f"critic-{uuid.uuid4().hex[:8]}"
        cluster = run_on_all_ranks(lambda: self._start(run, name) if get_rank() == 0 else None, **_ERRORS)[0]
        name = run_on_all_ranks(lambda: name)[0]

        def join() -> None:
            import ray

            if get_rank() > 0:
                self._joined = JoinedRay(cast(Any, cluster), member=f"rank {get_rank()}")
            self._desk, self._sent, self.trained = ray.get_actor(name, namespace=NAMESPACE), 0, False

        try:
            run_on_all_ranks(join, **_ERRORS)
            ready = self.ask("ready", None, what="the start")
            # Longer than the ranks themselves wait for room in the cluster: their error says what is missing.
            limit = self.start_timeout + _REPORT_SECONDS
            self.processes = run_on_all_ranks(lambda: ready.result(within=limit), **_ERRORS)[0]
        except BaseException:
            self.close()
            raise
        if get_rank() == 0:
            log.info("%d rank(s) of the critic are ready", self.num_ranks)

    def _start(self, run: CriticRun, name: str) -> Any:
        import ray

        if self.strategy not in StrategyRegistry:
            known = [one for one in StrategyRegistry.available_strategies() if one.startswith("rlhf_zero")]
            raise ValueError(f"strategy={self.strategy!r} of the CriticPool is none of {', '.join(sorted(known))}")
        of_strategy = StrategyRegistry[self.strategy]
        kind, arguments = of_strategy["strategy"], of_strategy["init_params"] | self.strategy_arguments
        run = dataclasses.replace(run, make_strategy=partial(kind, **arguments), num_nodes=self.num_nodes)
        if self.precision is not None:
            run = dataclasses.replace(run, precision=self.precision)
        if self.num_ranks > 1 and not isinstance(self.resources, ReservedResources):
            check_whole_gpus(self.resources)  # not earlier: a checkpoint has a Placement's parts of GPUs as numbers
        join_or_start_ray(object_store_memory=256 * 2**20)
        ray.cloudpickle.register_pickle_by_value(critic_desk)  # see that module's docstring
        desk = ray.remote(critic_desk.CriticDesk).options(
            name=name, namespace=NAMESPACE, num_cpus=0, max_concurrency=100_000
        )
        self._desk = desk.remote(get_world_size(), self.num_ranks)
        needs = self.resources or {"CPU": 0.001}
        device = "cuda" if needs.get("GPU") else "cpu"
        work = partial(run_rank, dataclasses.replace(run, device=device), self._desk)
        self._ranks = _Ranks(
            partial(
                cast(StartsRanksOnRay, kind).run_on_ray,
                work,
                num_ranks=self.num_ranks,
                num_nodes=self.num_nodes,
                resources_per_rank=needs if isinstance(needs, ReservedResources) else dict(needs),
                device=device,
                timeout=self.start_timeout,
            ),
            self._desk,
        )
        return this_cluster()

    def close(self) -> None:
        """End the critic's ranks; :meth:`start` may be called again. Not a collective."""
        import ray

        ranks, self._ranks, self._desk = self._ranks, None, None
        if ranks is not None and ray.is_initialized():
            ranks.end()
        if self._joined is not None:
            self._joined.close()
            self._joined = None

    def stop(self) -> None:
        """End the critic's ranks when they have finished what they were asked, and keep the weights. A collective."""
        if not self.started:
            return
        stopped = self.ask("stop", None)
        run_on_all_ranks(lambda: stopped.result(), **_ERRORS)
        if self._ranks is not None:
            self.weights = self._ranks.returned(self.request_timeout)
        self.close()

    # ---------------------------------------------------------------- requests

    def _post(self, kind: str, part: Any, *rest: Any) -> int:
        if self._desk is None:
            raise CriticPoolError("the critic's ranks have not been started, or have ended")
        number, self._sent = self._sent, self._sent + 1
        self._desk.post.remote(get_rank(), number, kind, part, *rest)
        return number

    def ask(self, kind: str, part: Any, *, what: str = "") -> "PendingAnswer":
        """Ask for something that all training ranks ask for at the same point of their work; returns at once.

        Args:
            kind: See :class:`~rlhfkit.roles.critic_rank.CriticWork`.
            part: This rank's part of the request.
            what: What is waited for, in words.
        """
        return PendingAnswer(self, self._post(kind, part), what or kind)

    def ask_values(self, experience: Experience, batches: Sequence[Tensor]) -> "PendingAnswer":
        """Ask for values of this rank's rows; returns at once.

        Args:
            experience: B sequences of this rank.
            batches: Indices (b,) of the rows of each forward pass.
        """
        import ray

        refs = [ray.put(slim(experience.select(rows))) for rows in batches]
        return self.ask("values", refs, what="the values of an iteration")

    def train(self, batch: Experience, micro_batches: int) -> None:
        """Send a micro-batch with values and returns; returns at once.

        ``micro_batches``: those of this rank in the optimizer step.
        """
        import ray

        self._post("batch", [ray.put(slim(batch))], micro_batches)
        self.trained = True

    def fetch(self, stored: Any) -> Any:
        """Get what a critic rank has put into Ray's object store, by its reference.

        Raises:
            CriticPoolError: If that rank has died since, or the object does not arrive in time.
        """
        import ray

        try:
            return ray.get(stored, timeout=self.request_timeout)
        except ray.exceptions.RayError as error:
            raise CriticPoolError(
                f"what a critic rank has answered did not arrive: {type(error).__name__}: {first_lines_of(error)} The "
                "run can be resumed from its last checkpoint"
            ) from error

    def save(self, folder: Path) -> "PendingAnswer":
        """Have the critic saved to a folder that all its ranks can write."""
        return self.ask("save", str(folder), what=f"the critic's checkpoint {folder}")

    def work(self) -> list[tuple[str, str, float, float]]:
        """When the critic's ranks have worked lately, by their clocks: role, phase, start and end."""
        import ray

        found = [] if self._desk is None else ray.get(self._desk.work.remote(), timeout=self.request_timeout)
        lanes = {rank: "critic" if self.num_ranks == 1 else f"critic {rank}" for rank in range(self.num_ranks)}
        return [(lanes[rank], phase, start, end) for rank, phase, start, end in found]

    def report(self) -> "PendingAnswer":
        """Ask for the metrics of what was trained since the last report, when all of it is trained."""
        return self.ask("report", None, what="the critic's updates of an iteration")


_ERRORS: Any = {"error_type": CriticPoolError}


def slim(batch: Experience) -> Experience:
    """The batch on the CPU, without what a critic does not read."""
    bare = dataclasses.replace(
        batch,
        old_logprobs=None,
        advantages=None,
        token_rewards=None,
        columns={name: batch.columns[name] for name in ("values", "returns") if name in batch.columns},
        reward_parts={},
        iteration=None,
    )
    return bare.to("cpu")


class PendingAnswer:
    """Something that the critic's ranks are doing."""

    def __init__(self, pool: CriticPool, number: int, what: str) -> None:
        self._pool, self._number, self._what = pool, number, what
        self._ref = pool._desk.answers.remote(number)

    def result(self, *, within: float | None = None) -> list[Any]:
        """Wait; returns the answers of the critic's ranks, by rank.

        Args:
            within: Seconds; ``None``: as long as the ranks finish something every ``request_timeout`` seconds.

        Raises:
            CriticPoolError: If the critic's ranks have failed, or the time is up.
        """
        import ray

        pool, started = self._pool, time.monotonic()
        limit = within or pool.request_timeout
        seen, moved = -1, started
        try:
            while not ray.wait([self._ref], timeout=_POLL_SECONDS)[0]:
                finished = ray.get(pool._desk.finished.remote(), timeout=limit)
                if within is None and finished != seen:
                    seen, moved = finished, time.monotonic()
                if time.monotonic() - moved > limit:
                    raise CriticPoolError(
                        f"waited {limit:g} s for {self._what} of {pool.num_ranks} critic rank(s), which finished "
                        "nothing. The run can be resumed from its last checkpoint; if they are only slow, raise "
                        + ("CriticPool(start_timeout=...)" if within else "CriticPool(request_timeout=...)")
                    )
            kind, found = ray.get(self._ref)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise CriticPoolError(f"the critic's desk has ended while waiting for {self._what}: {error}") from error
        finally:
            pool.waited += time.monotonic() - started
        if kind == "failed":
            raise CriticPoolError(
                f"waiting for {self._what}: the critic's ranks have failed: {found} The run can be resumed from its "
                "last checkpoint"
            )
        return list(found)


class _Ranks:
    """The critic's ranks, watched by a thread of rank 0 of training.

    Args:
        run: Starts them and returns what rank 0 of them returns; ``on_start`` is called with their actors.
        desk: Is told when they fail.
    """

    def __init__(self, run: Callable[..., Any], desk: Any) -> None:
        self._run, self._desk = run, desk
        self._result: Any = None
        self._failure = ""
        self._ending = False
        self._actors: Sequence[Any] = ()
        self._thread = threading.Thread(target=self._watch, name="critic ranks", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        import ray

        try:
            self._result = self._run(on_start=self._remember)
        except BaseException as error:  # the training ranks learn of it when they next wait
            self._failure = f"{type(error).__name__}: {first_lines_of(error)}"
            if not self._ending and ray.is_initialized():
                self._desk.fail.remote(self._failure)

    def _remember(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)

    def returned(self, seconds: float) -> Any:
        """What rank 0 of the critic returned, when all have ended; ``None``, with a warning, if that fails."""
        self._thread.join(seconds)
        late = f"they have not ended within {seconds:g} s" if self._thread.is_alive() else ""
        if self._failure or late:
            log.warning("the critic's ranks did not return its weights: %s", self._failure or late)
        return self._result

    def end(self) -> None:
        import ray

        self._ending = True
        if self._thread.is_alive():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            self._thread.join(_STOP_SECONDS)
        ray.kill(self._desk, no_restart=True)
