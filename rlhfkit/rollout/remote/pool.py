"""``RemoteEnginePool``: several engines in Ray actors that look like one engine; the base class of ``VLLMPool``.

Rank 0's pool owns the actors. All ranks call ``start``, ``load``, ``sleep``, ``wake`` and ``close``, whose errors are
raised on all. Each rank calls ``generate``, ``stream`` and ``score`` for itself, from any thread, also during ``load``:
requests are kept and continue with the new weights. Requests and results pass between rank and engine only. What a dead
engine has not finished is sampled again, with the same result.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import gather_objects, run_on_all_ranks
from rlhfkit.gpus import mixed_engine_kinds
from rlhfkit.rank_store import RankLog, RankStore, rank_store
from rlhfkit.ray_placement import ReservedResources
from rlhfkit.ray_session import JoinedRay, this_cluster
from rlhfkit.rollout.collector import sample_all
from rlhfkit.rollout.engine import AdapterSource, RolloutEngine, SamplingSpec, WeightSource, check_scored
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.placement import (
    ActorPlacement,
    DedicatedPlacement,
    RankLocation,
    check_locations,
    colocated_placements,
    held_placements,
    locate_rank,
    start_ray_for_engines,
    why_ray_has_few_gpus,
)
from rlhfkit.rollout.remote.rank_memory import free_cached_memory, release_exported_buffers
from rlhfkit.rollout.remote.stream import PoolStream
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.table import PoolSettings
from rlhfkit.rollout.weight_sync.coordinator import WeightSyncCoordinator, attempt_sync
from rlhfkit.rollout.weight_sync.sender import WeightSender
from rlhfkit.rollout.weight_sync.transfers import Transfer, check_transfer, make_sender, resolve_transfer
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

_SYNC_ATTEMPTS = 4
"""Attempts at one weight sync. Engines may die in all but the last."""
_CONNECT_SECONDS = 180.0
"""Time for all ranks to join the engines' Ray cluster, on a busy machine."""


class RemoteEnginePool(RolloutEngine):
    """N remote engines as one :class:`~rlhfkit.rollout.engine.RolloutEngine`.

    A subclass has a constructor and implements :meth:`start_engines` and :meth:`make_request`. The arguments and the
    use of Ray are those of :class:`~rlhfkit.VLLMPool`.
    """

    shared = True
    updates_in_flight = True
    continuous_batching = True
    can_stream = True
    colocate = False
    max_model_len: int | None = None
    dtype: str | None = None
    """Type the engines compute in; ``None``: that of the weights they are sent."""

    def __init__(
        self,
        num_engines: int,
        processes_per_engine: int,
        *,
        colocate: bool,
        sleep_level: int,
        cpus_per_engine: int,
        device: str | None,
        start_timeout: float,
        generate_timeout: float,
        sync_timeout: float,
        transfer: str = "auto",
        bucket_bytes: int | None,
        health: HealthPolicy | None,
    ) -> None:
        check_integer("num_engines", num_engines, minimum=1)
        check_integer("processes_per_engine", processes_per_engine, minimum=1)
        check_integer("cpus_per_engine", cpus_per_engine, minimum=1)
        check_integer("bucket_bytes", bucket_bytes, minimum=1, optional=True)
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        check_number("generate_timeout", generate_timeout, above=0, why="it is in seconds")
        check_number("sync_timeout", sync_timeout, above=0, why="it is in seconds")
        check_integer("sleep_level", sleep_level, minimum=1, maximum=2)
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be None, 'cpu' or 'cuda', got {device!r}")
        self.num_engines = num_engines
        self.processes_per_engine = processes_per_engine
        """Processes of an engine that hold weights, each with a device of its own."""
        self.colocate = colocate
        self.sleep_level = sleep_level
        self.cpus_per_engine = cpus_per_engine
        self.device = device
        self.start_timeout = start_timeout
        self.generate_timeout = generate_timeout
        self.sync_timeout = sync_timeout
        self.transfer = check_transfer(transfer, device=device, colocate=colocate)
        self.bucket_bytes = bucket_bytes
        self.health = health or HealthPolicy()
        self.version: int | None = None
        self.engines: Engines | None = None
        """The engines as this rank sees them, after :meth:`start`."""
        self.sender: WeightSender | None = None
        """This rank's part in sending weights, if it has one."""
        self._sync_metrics: dict[str, float] = {}
        self.adapter: dict[str, Any] | None = None
        """On rank 0, settings of the LoRA adapter that engines apply themselves; ``None``: it is merged or none."""
        self.may_send_adapter = False
        """Whether rank 0 was asked for such engines; the same on every rank."""
        self.reserved: ReservedResources | None = None
        """Devices that a :class:`~rlhfkit.Placement` holds for the engines; ``None``: Ray finds some at the start."""
        self.given_tokenizer: Any = None
        """The run's tokenizer; ``None``: the model's own."""
        self.tokenizer: Any = None
        """Writes the texts of samples; set by :meth:`prepare_requests`, without it there are none."""
        self._started = False
        self._loading = False
        self._asleep = False
        self._sync: WeightSyncCoordinator | None = None
        self._dedicated: DedicatedPlacement | None = None  # devices that are held for the engines, on rank 0
        self._gpu_note = ""  # for an error about too few GPUs
        self._joined: JoinedRay | None = None  # on other ranks
        self._store: RankStore | None = None

    @property
    def spans_machines(self) -> bool:
        """Whether the processes of an engine may be on several machines."""
        return False

    # ---------------------------------------------------------------- to be implemented

    @abstractmethod
    def start_engines(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool, ranks: list[RankLocation]
    ) -> None:
        """Set :attr:`engines`, which have started, and :attr:`sender`. Called on rank 0.

        Their ``num_ranks`` counts all that send requests (``get_world_size()``). ``ranks`` are all training
        ranks, for :meth:`connect_to_ray` and :meth:`placements`; empty without a trainer.
        """
        ...

    @abstractmethod
    def make_request(self, prompt: Prompt, index: int, *, sampling: SamplingSpec, iteration: int) -> Request:
        """Return the request for sample ``index`` of a prompt's group; nothing is left to the engine's defaults."""
        ...

    def prepare_requests(self, model: str, trust_remote_code: bool) -> None:
        """Learn about the model what :meth:`make_request` needs. Called on every rank; does nothing by default."""

    def check_sampling(self, sampling: SamplingSpec) -> None:
        """Raise ValueError if the engines do not support these settings; by default all are accepted."""

    # ---------------------------------------------------------------- start and end

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.given_tokenizer = tokenizer

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Start the engines, on rank 0, and connect the other ranks to them. Called on every rank.

        Raises:
            ImportError: If Ray or the engine's package is not installed.
            EngineError: If the cluster is too small, an engine cannot start, ``start_timeout`` has passed, or a rank's
                machine is not part of rank 0's Ray cluster.
        """
        if self._started:
            return
        # Engines with the model's own weights and devices of their own do not depend on where the ranks are.
        alone = load_weights and not self.colocate
        ranks = [] if alone else gather_objects(locate_rank(colocate=self.colocate))
        self._store = store = rank_store()
        log = store.log("engines/start")
        start = partial(self._start, model, dtype, trust_remote_code, load_weights, ranks, log)
        connect = partial(self._connect, model, trust_remote_code, log)
        try:
            # Ranks wait on the store, as engines may take longer to start than the process group's time limit.
            log.run(
                start if store.rank == 0 else connect,
                timeout=2 * self.start_timeout + _CONNECT_SECONDS,  # for room in the cluster, then for the engines
                waiting_for=f"the engines of {type(self).__name__} to start",
                error_type=EngineError,
            )
        except BaseException:
            self.close()
            raise
        self._started = True
        self.version = 0 if load_weights else None

    def _start(
        self,
        model: str,
        dtype: torch.dtype,
        trust_remote_code: bool,
        load_weights: bool,
        ranks: list[RankLocation],
        log: RankLog,
    ) -> None:
        """Start the engines, and tell the other ranks how to reach them."""
        self.prepare_requests(model, trust_remote_code)
        self.start_engines(model, dtype, trust_remote_code, load_weights, ranks)
        assert self.engines is not None
        assert self.sender is not None
        self._warn_of_mixed_gpus(ranks)
        # After a failed call, the multi-process executor of vLLM 0.32 leaves answers of other workers unread and
        # takes them for those of later calls, so an engine of several processes cannot be used any more.
        recoverable = self.sender.recoverable and self.processes_per_engine == 1
        self._sync = WeightSyncCoordinator(self.engines, self.sender, recoverable=recoverable)
        if log.store.world_size > 1:
            log.append((this_cluster(), self.engines.table_name))

    def _warn_of_mixed_gpus(self, ranks: Sequence[RankLocation]) -> None:
        assert self.engines is not None
        kinds = [handle.info.get("gpus", ()) for handle in self.engines.handles]
        mixed = mixed_engine_kinds(kinds, [rank.kind for rank in ranks])
        if mixed is not None:
            log.warning("%s", mixed)

    def _connect(self, model: str, trust_remote_code: bool, log: RankLog) -> None:
        """Wait for rank 0's engines and connect to them."""
        self.prepare_requests(model, trust_remote_code)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.resolve_transfer(device) == "ipc":  # the only one with a part for every rank
            self.sender = make_sender("ipc", timeout=self.sync_timeout, bucket_bytes=self.bucket_bytes)
        entries: list[tuple[int, Any]] = []
        while not entries:
            entries = log.read(1.0)
        cluster, table_name = entries[0][1]
        try:
            self._joined = JoinedRay(cluster, member=f"rank {log.store.rank}")
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        self.engines = Engines.join(table_name, rank=log.store.rank, num_ranks=log.store.world_size)

    def settings(self, has_weights: bool) -> PoolSettings:
        """Return what :attr:`engines` are started with; ``has_weights``: they serve the model's own."""
        return PoolSettings(
            num_engines=self.num_engines,
            workers_per_engine=self.processes_per_engine,
            sync_timeout=self.sync_timeout,
            start_timeout=self.start_timeout,
            policy=self.health,
            has_weights=has_weights,
        )

    def connect_to_ray(self, ranks: list[RankLocation]) -> str:
        """Join Ray, or start it without the ranks' GPUs, and return the engines' device, ``"cpu"`` or ``"cuda"``."""
        import ray

        check_locations(ranks)
        self._release_devices()  # of engines that could not be started, before others are tried
        cores = self.num_engines * self.processes_per_engine * self.cpus_per_engine
        started_here = start_ray_for_engines(num_cpus=cores, ranks=ranks)
        gpus = ray.cluster_resources().get("GPU", 0) or any(rank.gpu is not None for rank in ranks)
        device = self.device or ("cuda" if gpus else "cpu")
        self._gpu_note = why_ray_has_few_gpus(ranks) if started_here and device == "cuda" else ""
        return device

    def _release_devices(self) -> None:
        if self._dedicated is not None:
            self._dedicated.close()
            self._dedicated = None

    def resolve_transfer(self, device: str) -> Transfer:
        """Return the transfer for engines on ``"cpu"`` or ``"cuda"``; ValueError if it is not possible there."""
        return resolve_transfer(self.transfer, device=device, colocate=self.colocate)

    def placements(self, device: str, ranks: list[RankLocation]) -> list[ActorPlacement]:
        """Return where each engine runs; EngineError if the devices have no room."""
        if self.colocate:
            return colocated_placements(ranks, self.num_engines, self.processes_per_engine)
        if self.reserved is not None:
            self.reserved.check_processes(self.num_engines, "engine(s)")
            return held_placements(self.reserved, ranks)
        processes = self.processes_per_engine
        self._dedicated = DedicatedPlacement(
            self.num_engines,
            self.cpus_per_engine * (processes if device == "cpu" else 1),
            processes if device == "cuda" else 0,
            self.start_timeout,
            ranks=ranks,
            processes=processes if self.spans_machines else 1,
            note=self._gpu_note,
        )
        return self._dedicated.placements()

    def close(self) -> None:
        """Kill the engines; :meth:`start` may be called again. A Ray session started here lives on."""
        parts = (self.sender, self.engines, self._joined)
        for part in parts:
            if part is not None:
                part.close()
        self._release_devices()
        self.engines, self.sender, self._sync, self._joined, self.given_tokenizer = None, None, None, None, None
        self._store, self._started, self._asleep, self.version = None, False, False, None

    # ---------------------------------------------------------------- sleep

    def sleep(self) -> None:
        """Have colocated engines free GPU memory until :meth:`wake`. Called on every rank.

        At ``sleep_level=2`` the weights are dropped, and ``version`` becomes ``None``.
        """
        if not (self.colocate and self._started) or self._asleep:
            return
        self._on_rank_0(lambda engines: engines.sleep(self.sleep_level))
        self._asleep = True
        self.version = self.version if self.sleep_level == 1 else None

    def wake(self) -> None:
        """Undo :meth:`sleep`; after a :meth:`load` only the cache is left to allocate. Called on every rank."""
        if self._asleep:
            self._free_rank_memory()
            self._on_rank_0(Engines.wake)
            self._asleep = False

    def _free_rank_memory(self) -> None:
        """Have every rank free torch's cache before colocated engines allocate memory. A collective."""
        if self.colocate:
            run_on_all_ranks(free_cached_memory, error_type=EngineError)  # also waits for the last rank

    def _on_rank_0(self, step: Callable[[Engines], None]) -> None:
        """Do something with the engines on rank 0, of which all ranks know then; errors are raised on all."""
        engines = self.engines
        assert engines is not None
        run_on_all_ranks(lambda: step(engines) if self._sync is not None else None, error_type=EngineError)
        engines.update(at_once=True)

    # ---------------------------------------------------------------- weights

    def load(self, weights: WeightSource, version: int) -> None:
        """Send the weights to all engines. Called on every rank.

        Engines that sleep allocate the memory of their weights; :meth:`wake` comes next.
        While it runs, and after it failed, ``version`` is ``None`` and no new requests are accepted. If an engine dies
        of it, the weights are sent again to the others; a restarted engine takes part. A source that raises before its
        first tensor (weights that are not finite) leaves the engines and their version as they were.

        Raises:
            EngineError: If no engine is left, or one did not confirm within ``sync_timeout``; on every rank.
        """
        if not self._started:
            raise RuntimeError(f"{type(self).__name__}.load was called before {type(self).__name__}.start")
        before, self._loading = self.version, True
        self.version = None
        try:
            for attempt in range(1, _SYNC_ATTEMPTS + 1):
                self._wait_for_engines()
                self._free_rank_memory()
                sent, total = self._as_engines_take_it(weights)
                outcome = attempt_sync(sent, version, self.sender, self._sync)
                if self.colocate:
                    release_exported_buffers()  # engines have closed them when they finished the update
                if outcome.error is None:
                    self.version = version
                    if self.engines is not None:
                        self.engines.update(at_once=True)
                    self._count_bytes(sent, total)
                    return
                if not outcome.started and attempt == 1:
                    self.version = before
                if not outcome.can_retry or attempt == _SYNC_ATTEMPTS:
                    raise outcome.error
                log.warning("engines died during the weight sync; the weights are sent again to the others")
        finally:
            self._loading = False

    def _as_engines_take_it(self, weights: WeightSource) -> tuple[WeightSource, int]:
        """Return all weights, or the adapter alone for engines that apply it, and the bytes of all. A collective."""
        whole = weights.in_checkpoint_format()
        total = sum(info.num_bytes for info in whole.metadata())
        if not self.may_send_adapter:
            return whole, total
        apart, with_base = gather_objects((self._engines_apply(weights), self._sync is None or self._sync.needs_base))[
            0
        ]
        return (cast(AdapterSource, weights).adapter_apart(with_base=with_base) if apart else whole), total

    def _engines_apply(self, weights: WeightSource) -> bool:
        """Whether the weights have the adapter for which the engines were started; known on rank 0."""
        if self.adapter is None or not isinstance(weights, AdapterSource):
            return False
        try:
            return weights.adapter_settings() == self.adapter
        except ValueError:
            return False

    def _count_bytes(self, weights: WeightSource, total: int) -> None:
        sent = sum(info.num_bytes for info in weights.metadata())
        self._sync_metrics = {"rollout/sync_bytes": float(sent), "rollout/sync_bytes_saved": float(total - sent)}

    def sync_metrics(self) -> Mapping[str, float]:
        """Return ``rollout/sync_bytes``, what the last :meth:`load` sent to each engine, and how many were saved."""
        return self._sync_metrics

    def _wait_for_engines(self) -> None:
        """Wait on the store until rank 0 has an engine that is up: a restart may take longer than a collective may."""
        assert self._store is not None
        self._store.log("engines/up").run(
            lambda: None if self._sync is None else self._sync.wait_for_engines(),
            timeout=2 * self.start_timeout + _CONNECT_SECONDS,
            waiting_for="an engine that can be sent weights",
            error_type=EngineError,
        )

    # ---------------------------------------------------------------- sampling

    def _serving(self) -> Engines:
        """Return the engines; RuntimeError unless they have weights or are being sent some."""
        name = type(self).__name__
        if self.engines is None:
            raise RuntimeError(f"the engines are not running: {name}.start comes first (RolloutCallback calls it)")
        # Checked twice, as a load in another thread may end between the two checks.
        if self.version is None and not self._loading and self.version is None:
            raise RuntimeError(
                f"the engines have no complete weights: none were loaded yet, they are asleep, or the last {name}.load "
                "failed. RolloutCallback loads them; or call load() yourself"
            )
        if self._asleep and not self._loading:
            raise RuntimeError("the engines are asleep: call wake() on every rank first")
        return self.engines

    def knows_logprobs(self, sampling: SamplingSpec) -> bool:
        """Whether the engines report log-probs at the sampling temperature before truncation."""
        return not sampling.truncates

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample on all engines, for this rank alone. Any thread.

        Raises:
            ValueError: If the engines do not support these settings.
            RequestError: If a prompt exceeds the context or has unknown tokens, or a request is refused.
            WeightsNeededError: If no engine serves, and some wait for weights or are starting.
            EngineError: If all engines are dead, or nothing was finished for ``generate_timeout`` seconds.
            RankError: If rank 0, which manages the engines, is gone.
        """
        return sample_all(self.stream(sampling, iteration=iteration), prompts, tokenizer=self.tokenizer)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> PoolStream:
        """Return groups of this rank as they are finished. Any thread, several streams at a time.

        Raises:
            ValueError: If the engines do not support these settings.
        """
        engines = self._serving()
        self.check_sampling(sampling)
        return PoolStream(
            engines,
            sampling,
            partial(self.make_request, sampling=sampling),
            self.generate_timeout,
            iteration=iteration,
            knows_logprobs=self.knows_logprobs(sampling),
            sees_images=self.image_processor is not None,
        )

    def sent_images(self, sequence: Sequence[int], images: Sequence[Any]) -> Any:
        """What the engines' ``score`` is given for a sequence with images, if they see them."""
        raise NotImplementedError(f"{type(self).__name__} sees no images")

    def score(self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()) -> list[list[float]]:
        """Return the log-probs of given tokens by the first engine; see :meth:`scores`."""
        return next(iter(self.scores(sequences, images).values()))

    def scores(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Any, ...]] = ()
    ) -> Mapping[str, list[list[float]]]:
        """Return the log-probs of given tokens, by engine, asked for by this rank alone. Any thread.

        Raises:
            ValueError: If a sequence has fewer than 2 tokens or exceeds the context.
            EngineError: If no engine is left, or they took too long.
        """
        engines = self._serving()
        check_scored(sequences, context=engines.max_model_len, vocabulary=engines.vocabulary)
        asked: list[Any] = [[list(sequence) for sequence in sequences]]
        if images:
            asked.append([self.sent_images(row, seen) for row, seen in zip(asked[0], images, strict=True)])
        scores = engines.call(State.SERVING, "score", *asked, doing="scoring sequences", timeout=self.generate_timeout)
        if not scores:
            raise EngineError(f"no {engines.engine_name} serves:\n{engines.report()}")
        return {f"engine {number}": found for number, found in scores.items()}
