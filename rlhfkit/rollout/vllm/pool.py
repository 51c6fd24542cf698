"""``VLLMPool``: several vLLM engines in Ray actors that look like one engine.

The pool is shared: every rank of the training holds one, rank 0's owns the actors. ``start``, ``load`` and ``close``
are called by every rank, ``generate`` and ``score`` by rank 0. Whatever goes wrong in ``start`` or ``load`` on one rank
is raised on all.

Samples do not depend on how many engines there are or which of them made what: each has a seed of its own. So what a
dead engine has not finished is made again by another, and comes out the same.

``generate`` may be called from several threads at once, and while ``load`` runs in the main thread: requests are kept
during a load, continue with the new weights, and their samples say which token is of which version.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import gather_objects, get_rank, run_on_all_ranks
from rlhfkit.rollout.collector import sample_all
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource, check_tokens
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.gpu_reservation import Reservation
from rlhfkit.rollout.remote.placement import ActorPlacement, DedicatedPlacement, RankLocation, beside_ranks, my_seat
from rlhfkit.rollout.remote.stream import PoolStream
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.manager import EngineManager
from rlhfkit.rollout.vllm.arguments import engine_arguments, engine_environment
from rlhfkit.rollout.vllm.ray_session import join_or_start_ray, require_ray
from rlhfkit.rollout.weight_sync.coordinator import WeightSyncCoordinator, attempt_to_send
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender
from rlhfkit.rollout.weight_sync.nccl import NcclSender
from rlhfkit.rollout.weight_sync.sender import GlooSender, WeightSender
from rlhfkit.rollout.weight_sync.source import DEFAULT_BUCKET_BYTES
from rlhfkit.validation import check_integer, check_number

log = logging.getLogger(__name__)

# vLLM 0.32 takes temperatures up to 2 and silently raises those below 0.01.
_TEMPERATURES = (0.01, 2.0)
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_size_local")
"""Arguments of vLLM that say how many processes an engine has, which the pool has to know."""
_SYNC_ATTEMPTS = 4
"""Engines may die in so many attempts of one weight sync but the last."""


class VLLMPool(RolloutEngine):
    """N vLLM engines as one :class:`~rlhfkit.rollout.engine.RolloutEngine`.

    Ray is joined when this process is connected to it already or ``RAY_ADDRESS`` is set, and started on this machine
    otherwise. Nothing is started before :meth:`start`.

    Example::

        RolloutCallback(engine=VLLMPool(num_engines=2), reward=math_match)

    Args:
        num_engines: Engines.
        tensor_parallel_size: GPUs (on a CPU: processes) per engine.
        max_model_len: Tokens of prompt and completion; ``None``: the model's context.
        colocate: Engines share the GPUs of the training ranks: weights pass as handles to GPU memory, and :meth:`sleep`
            makes room for training (``RolloutCallback`` calls it). Else engines have devices of their own.
        sleep_level: What :meth:`sleep` does with the weights: 1 moves them to main memory, 2 drops them, as the next
            :meth:`load` brings new ones (vLLM's levels).
        dtype: Type the engines compute in, e.g. ``"bfloat16"``; ``None``: the type of the weights they are sent.
        gpu_memory_utilization: Share of a GPU's memory that vLLM may use (vLLM's default is 0.92); ``None``: 0.9, and
            0.5 when colocated.
        kv_cache_gib: Size of the cache of keys and values in GiB; ``None``: what is left of ``gpu_memory_utilization``,
            and 1 GiB on a CPU.
        cpus_per_engine: Cores of an engine; on a CPU also its number of threads.
        device: ``"cpu"`` or ``"cuda"``; ``None``: GPUs if Ray's cluster has any.
        engine_arguments: Any other argument of ``vllm.EngineArgs``; wins over ours. Not the numbers of its processes.
        environment: Environment variables of the engines.
        start_timeout: Seconds for all engines to be ready.
        generate_timeout: Seconds without any request of a batch being finished.
        sync_timeout: Seconds for each step of a weight transfer.
        probe_tolerance: Largest difference between the engines' log-probs of one sequence that :meth:`score` accepts.
        bucket_bytes: Bytes per broadcast of a weight transfer.
        health: How engines are watched, and what happens to those that fail.

    Raises:
        ValueError: If a number is out of range.
    """

    shared = True
    updates_in_flight = True
    can_stream = True
    colocate = False
    max_model_len: int | None = None

    def __init__(
        self,
        num_engines: int = 1,
        tensor_parallel_size: int = 1,
        *,
        colocate: bool = False,
        sleep_level: int = 2,
        max_model_len: int | None = None,
        dtype: str | None = None,
        gpu_memory_utilization: float | None = None,
        kv_cache_gib: float | None = None,
        cpus_per_engine: int = 1,
        device: str | None = None,
        engine_arguments: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        start_timeout: float = 600.0,
        generate_timeout: float = 1800.0,
        sync_timeout: float = 300.0,
        probe_tolerance: float = 0.02,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        health: HealthPolicy | None = None,
    ) -> None:
        share = gpu_memory_utilization
        counts = {
            "num_engines": num_engines,
            "tensor_parallel_size": tensor_parallel_size,
            "cpus_per_engine": cpus_per_engine,
            "bucket_bytes": bucket_bytes,
        }
        limits = {
            "start_timeout": start_timeout,
            "generate_timeout": generate_timeout,
            "sync_timeout": sync_timeout,
        }
        for name, count in counts.items():
            check_integer(name, count, minimum=1)
        for name, limit in limits.items():
            check_number(name, limit, above=0, why="it is in seconds")
        check_integer("max_model_len", max_model_len, minimum=2, optional=True)
        check_integer("sleep_level", sleep_level, minimum=1, maximum=2)
        check_number("gpu_memory_utilization", share, above=0, maximum=1, optional=True)
        check_number("kv_cache_gib", kv_cache_gib, above=0, optional=True)
        check_number("probe_tolerance", probe_tolerance, minimum=0, infinite=True, why="inf is no probe")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be None, 'cpu' or 'cuda', got {device!r}")
        sizes = [name for name in _SIZES if (engine_arguments or {}).get(name, 1) not in (1, None)]
        if sizes:
            raise ValueError(
                f"VLLMPool(engine_arguments=...) must leave {', '.join(sizes)} out: devices and weight transfers are "
                "laid out for VLLMPool(num_engines=..., tensor_parallel_size=...), and other sizes are not supported"
            )
        self.num_engines = num_engines
        self.tensor_parallel_size = tensor_parallel_size
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.colocate = colocate
        self.sleep_level = sleep_level
        self.gpu_memory_utilization = share or (0.5 if colocate else 0.9)
        self.kv_cache_gib = kv_cache_gib
        self.cpus_per_engine = cpus_per_engine
        self.device = device
        self.engine_arguments = dict(engine_arguments or {})
        self.environment = dict(environment or {})
        self.start_timeout = start_timeout
        self.generate_timeout = generate_timeout
        self.sync_timeout = sync_timeout
        self.probe_tolerance = probe_tolerance
        self.bucket_bytes = bucket_bytes
        self.health = health or HealthPolicy()
        self.version: int | None = None
        self._started = False
        self._loading = False
        self._asleep = False
        self._manager: EngineManager | None = None
        self._sender: WeightSender | None = None
        self._sync: WeightSyncCoordinator | None = None
        self._apart: DedicatedPlacement | None = None
        self._reservation: Reservation | None = None
        self._stops: tuple[int, ...] = ()
        self._logprobs_mode = self.engine_arguments.get("logprobs_mode", "processed_logprobs")

    # ---------------------------------------------------------------- start and end

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Start the engines, on rank 0; see :meth:`RolloutEngine.start`. Every rank calls it.

        Raises:
            ImportError: If Ray or vLLM is not installed.
            EngineError: If the cluster is too small, an engine cannot start, or ``start_timeout`` has passed.
        """
        if self._started:
            return
        # Weights of the model's own are served where nobody trains.
        seats = [] if load_weights and not self.colocate else gather_objects(my_seat(colocate=self.colocate))
        run_on_all_ranks(
            lambda: self._start_or_join(model, dtype, trust_remote_code, load_weights, seats), error_type=EngineError
        )
        self._started = True
        self.version = 0 if load_weights else None

    def _start_or_join(self, *arguments: Any) -> None:
        """This rank's part of :meth:`start`."""
        if get_rank() == 0:
            try:
                self._start(*arguments)
            except BaseException:
                self.close()
                raise
        elif self.colocate and self.device != "cpu" and torch.cuda.is_available():
            self._sender = IPCSender(bucket_bytes=self.bucket_bytes)

    def _start(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool, seats: list[RankLocation]
    ) -> None:
        require_ray()
        from rlhfkit.models.load import load_tokenizer, stop_token_ids

        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._stops = stop_token_ids(model, tokenizer, trust_remote_code=trust_remote_code)
        device = self._find_room(seats)
        self._sender = self._new_sender(device)
        in_process = device == "cpu" and self.tensor_parallel_size == 1
        environment = engine_environment(
            device=device,
            cpus_per_engine=self.cpus_per_engine,
            in_process=in_process,
            backend=self._sender.backend,
        )
        arguments = engine_arguments(
            model,
            dtype=self.dtype or dtype,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_gib=self.kv_cache_gib,
            device=device,
            backend=self._sender.backend,
            load_weights=load_weights,
            sleeps=self.colocate,
            logprobs_mode=self._logprobs_mode,
        )
        self._manager = EngineManager(
            self._places(device, seats),
            arguments | self.engine_arguments,
            in_process=in_process,
            environment=environment | self.environment,
            workers_each=self.tensor_parallel_size,
            sync_timeout=self.sync_timeout,
            start_timeout=self.start_timeout,
            policy=self.health,
            serves_at_once=load_weights,
        )
        self._manager.start()
        # After a failed call, the multi-process executor of vLLM 0.32 leaves answers of other workers unread and takes
        # them for those of later calls, so an engine of several processes cannot be trusted any more.
        mendable = self._sender.recoverable and self.tensor_parallel_size == 1
        self._sync = WeightSyncCoordinator(self._manager, self._sender, mendable=mendable)

    def _new_sender(self, device: str) -> WeightSender:
        if device == "cpu":
            return GlooSender(timeout=self.sync_timeout, bucket_bytes=self.bucket_bytes)
        if self.colocate:
            return IPCSender(bucket_bytes=self.bucket_bytes)
        return NcclSender(bucket_bytes=self.bucket_bytes)

    def _find_room(self, seats: list[RankLocation]) -> str:
        """Join or start Ray, and keep the ranks' GPUs out of its hands; returns the engines' kind of device."""
        import ray

        processes = self.num_engines * self.tensor_parallel_size
        own = join_or_start_ray(num_cpus=processes * self.cpus_per_engine, ranks=seats)
        gpus = ray.cluster_resources().get("GPU", 0) or any(seat.gpu is not None for seat in seats)
        device = self.device or ("cuda" if gpus else "cpu")
        if device == "cuda" and not own:
            self._reservation = Reservation(seats, self.start_timeout)
        return device

    def _places(self, device: str, seats: list[RankLocation]) -> list[ActorPlacement]:
        """Where the engines go."""
        if self.colocate:
            return beside_ranks(seats, self.num_engines, self.tensor_parallel_size)
        processes = self.tensor_parallel_size
        cpus = self.cpus_per_engine * (processes if device == "cpu" else 1)
        gpus = processes if device == "cuda" else 0
        held = 0 if self._reservation is None else len(self._reservation.gpus)
        self._apart = DedicatedPlacement(self.num_engines, cpus, gpus, self.start_timeout, ranks=seats, held=held)
        return self._apart.places()

    def close(self) -> None:
        """End the engines; :meth:`start` may be called again. A Ray started by this process stays until it ends."""
        if self._sender is not None:
            self._sender.close()
        if self._manager is not None:
            self._manager.close()
        if self._apart is not None:
            self._apart.close()
        if self._reservation is not None:
            self._reservation.close()
        self._manager, self._sender, self._sync, self._apart, self._reservation = None, None, None, None, None
        self._started, self._asleep, self.version = False, False, None

    # ---------------------------------------------------------------- sleep

    def sleep(self) -> None:
        """Have colocated engines give up GPU memory until the next :meth:`load` or :meth:`wake`. Every rank calls it.

        Nothing happens to engines with devices of their own. At ``sleep_level=2`` the weights are gone, and ``version``
        with them.
        """
        if not (self.colocate and self._started) or self._asleep:
            return
        keep = self.sleep_level == 1
        self._on_rank_0(lambda manager: manager.fall_asleep(self.sleep_level, keep))
        self._asleep = True
        self.version = self.version if keep else None

    def wake(self) -> None:
        """Undo :meth:`sleep`; :meth:`load` does so by itself, when the memory is needed. Every rank calls it."""
        if self._asleep:
            self._make_room()
            self._on_rank_0(EngineManager.wake_up)
            self._asleep = False

    def _make_room(self) -> None:
        """Before colocated engines take memory: every rank gives back what torch keeps for its own next allocations."""
        if self.colocate and torch.cuda.is_available():
            run_on_all_ranks(torch.cuda.empty_cache, error_type=EngineError)  # engines wake up when the last rank has

    def _on_rank_0(self, step: Callable[[EngineManager], None]) -> None:
        """Do something to the manager; what goes wrong is raised on every rank."""
        run_on_all_ranks(lambda: None if self._manager is None else step(self._manager), error_type=EngineError)

    def _serving(self) -> EngineManager:
        """The manager, if it has weights to serve, or is about to have."""
        if get_rank() != 0:
            raise RuntimeError(f"only rank 0 may ask the engines, as they are shared; this is rank {get_rank()}")
        if self._manager is None:
            raise RuntimeError("the engines are not running: VLLMPool.start comes first (RolloutCallback calls it)")
        # Looked at twice, as a load in another thread may end between the questions.
        if self.version is None and not self._loading and self.version is None:
            raise RuntimeError(
                "the engines have no complete weights: none were published yet, they are asleep, or the last "
                "VLLMPool.load failed. RolloutCallback publishes them; or call load() yourself"
            )
        if self._asleep and not self._loading:
            raise RuntimeError("the engines are asleep: call wake() on every rank first")
        return self._manager

    # ---------------------------------------------------------------- weights

    def load(self, weights: WeightSource, version: int) -> None:
        """Send the weights to all engines; see :meth:`RolloutEngine.load`. Every rank calls it.

        Running requests are kept and continue with the new weights. While it runs, and after it failed, ``version`` is
        ``None`` and nothing is sampled. If an engine dies of it, the weights are sent again to the others; a dead
        engine that has started again takes part. A source that refuses to yield (weights that are not finite) leaves
        the engines and their version as they were.

        Raises:
            EngineError: If no engine is left, or one did not confirm within ``sync_timeout``; on every rank.
        """
        if not self._started:
            raise RuntimeError("VLLMPool.load was called before VLLMPool.start")
        before, self._loading = self.version, True
        self.version = None
        try:
            weights = weights.as_saved()
            for attempt in range(1, _SYNC_ATTEMPTS + 1):
                self._make_room()
                outcome = attempt_to_send(weights, version, self._sender, self._sync)
                if outcome.error is None:
                    self.version, self._asleep = version, False
                    if self.colocate and torch.cuda.is_available():
                        torch.cuda.ipc_collect()  # finishing the update, engines have let go of the ranks' buffers
                    return
                if not outcome.touched and attempt == 1:
                    self.version = before
                if not outcome.worth_another or attempt == _SYNC_ATTEMPTS:
                    raise outcome.error
                log.warning("engines died while they were sent weights; sending them again to the others")
        finally:
            self._loading = False

    # ---------------------------------------------------------------- sampling

    def arrange_logprobs(self, sampling: SamplingSpec) -> bool:
        """Whether log-probs can be compared with the trainer's; see :class:`UntruncatedLogprobs`. Every rank calls it.

        vLLM gives log-probs either before temperature and truncation or after both, chosen when it starts. So those of
        truncated samples are known at temperature 1 (or 0) only, and if this was asked before :meth:`start`.
        """
        if not self._started and "logprobs_mode" not in self.engine_arguments:
            raw = sampling.truncates and sampling.temperature in (0.0, 1.0)
            self._logprobs_mode = "raw_logprobs" if raw else "processed_logprobs"
        return self._knows_logprobs(sampling)

    def _knows_logprobs(self, sampling: SamplingSpec) -> bool:
        """Whether what vLLM reports is the log-prob at the sampling temperature with nothing truncated."""
        if self._logprobs_mode == "raw_logprobs":
            return sampling.temperature in (0.0, 1.0)
        return not sampling.truncates

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample on whichever engine has the least to do; see :meth:`RolloutEngine.generate`. Rank 0, any thread.

        Raises:
            ValueError: If vLLM cannot sample at this temperature.
            RequestError: If a prompt leaves no room in the context or has unknown tokens, or vLLM refuses a request.
            EngineError: If no engine is left, or nothing was finished for ``generate_timeout`` seconds. What an engine
                that dies has not finished is made by the others.
        """
        return sample_all(self.stream(sampling, iteration=iteration), prompts)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> PoolStream:
        """Groups as they are finished; see :class:`~rlhfkit.rollout.collector.StreamingEngine`. Rank 0, any thread.

        Raises:
            ValueError: If vLLM cannot sample at this temperature.
        """
        manager = self._serving()
        low, high = _TEMPERATURES
        if sampling.temperature > high or 0 < sampling.temperature < low:
            raise ValueError(
                f"vLLM samples at temperature 0 (greedy) or {low} to {high}, got SamplingSpec.temperature="
                f"{sampling.temperature}"
            )
        return PoolStream(
            manager,
            sampling,
            iteration,
            self._stops,
            self.generate_timeout,
            knows_logprobs=self._knows_logprobs(sampling),
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens; see :meth:`RolloutEngine.score`. Rank 0 only.

        Every engine scores all of them, and they must agree: weights that went wrong in one engine only are noticed.

        Raises:
            ValueError: If a sequence has fewer than 2 tokens or does not fit into the context.
            EngineError: If engines differ by more than ``probe_tolerance``, none is left, or they took too long.
        """
        manager = self._serving()
        for sequence in sequences:
            if not 2 <= len(sequence) < manager.max_model_len:
                raise ValueError(
                    f"score() takes sequences of 2 to {manager.max_model_len - 1} tokens (vLLM samples one more), got "
                    f"one of {len(sequence)}"
                )
            check_tokens("a sequence to be scored", sequence, manager.vocabulary)
        rows = [list(sequence) for sequence in sequences]
        scores = manager.ask(State.SERVING, "score", rows, doing="scoring sequences", timeout=self.generate_timeout)
        if not scores:
            raise EngineError(f"no vLLM engine serves:\n{manager.report()}")
        (reference, expected), *others = scores.items()
        for engine, other in others:
            pairs = itertools.chain.from_iterable(zip(a, b, strict=True) for a, b in zip(expected, other, strict=True))
            difference = max((abs(a - b) for a, b in pairs), default=0.0)
            if not difference <= self.probe_tolerance:  # true for NaN as well
                raise EngineError(
                    f"engines {reference} and {engine} serve different weights: their log-probs of the same tokens "
                    f"differ by {difference:.3g}, more than VLLMPool(probe_tolerance={self.probe_tolerance:g})"
                )
        return expected
