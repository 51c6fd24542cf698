"""``VLLMPool``: several vLLM engines in Ray actors that look like one engine.

Rank 0's pool owns the actors. All ranks call ``start``, ``load``, ``sleep``, ``wake`` and ``close``, whose errors are
raised on all. Each rank calls ``generate``, ``stream`` and ``score`` for itself, from any thread, also during ``load``:
requests are kept and continue with the new weights. Requests and results pass between rank and engine only. What a dead
engine has not finished is sampled again, with the same result.
"""

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlhfkit.argument_names import AnswersNames
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import gather_objects, get_world_size, run_on_all_ranks
from rlhfkit.gpus import mixed_engine_kinds
from rlhfkit.rank_store import RankLog, RankStore, rank_store
from rlhfkit.ray_placement import ReservedResources
from rlhfkit.ray_session import JoinedRay, this_cluster
from rlhfkit.rollout.collector import sample_all
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource, check_scored
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.supervision.table import PoolSettings
from rlhfkit.rollout.vllm.actor import ActorLauncher
from rlhfkit.rollout.vllm.adapter_slot import NO_LORA, adapter_arguments
from rlhfkit.rollout.vllm.arguments import (
    check_head_size,
    check_quantization,
    check_vllm_sampling,
    engine_arguments,
    engine_environment,
    has_cpu_build,
    quantization_arguments,
    sample_request,
    vllm_resume_problem,
)
from rlhfkit.rollout.vllm.parallelism import Parallelism
from rlhfkit.rollout.vllm.placement import (
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
from rlhfkit.rollout.vllm.stream import PoolStream
from rlhfkit.rollout.weight_sync.coordinator import (
    Transfer,
    WeightSyncCoordinator,
    attempt_sync,
    check_transfer,
    make_sender,
    resolve_transfer,
)
from rlhfkit.rollout.weight_sync.cuda_ipc import free_cached_memory, release_exported_buffers
from rlhfkit.rollout.weight_sync.sender import WeightSender
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rlhfkit.rollout.vllm.images import ImageRequests

log = logging.getLogger(__name__)

_SYNC_ATTEMPTS = 4
"""Attempts at one weight sync. Engines may die in all but the last."""
_CONNECT_SECONDS = 180.0
"""Time for all ranks to join the engines' Ray cluster, on a busy machine."""


class _EngineNames(AnswersNames, type(RolloutEngine)):  # type: ignore[misc]  # a protocol's metaclass
    """Answers wrong names of arguments of an engine."""


class VLLMPool(RolloutEngine, metaclass=_EngineNames):
    """N vLLM engines as one :class:`~rlhfkit.rollout.engine.RolloutEngine`.

    Ray is joined when this process is connected to it already or ``RAY_ADDRESS`` is set, and started on this machine
    otherwise. Nothing is started before :meth:`start`.

    Example::

        RolloutCallback(engine=VLLMPool(num_engines=2), reward=math_match)

    Args:
        num_engines: Number of engines.
        tensor_parallel_size: Processes, each on a GPU of its own, that divide every layer of an engine.
        pipeline_parallel_size: Stages of consecutive layers, each of ``tensor_parallel_size`` processes.
        data_parallel_size: Of mixtures of experts: replicas of the attention layers, each of ``tensor_parallel_size *
            pipeline_parallel_size`` processes, that share the experts. Needs GPUs. All processes of such an engine
            are on one machine. Others are divided equally over as few machines as have room for them.
        expert_parallel: Of mixtures of experts: deal whole experts to the processes of a stage (vLLM's
            ``enable_expert_parallel``); else each expert is divided over them. Weights are sent in full either way.
        max_model_len: Tokens of prompt and completion; ``None``: the model's context.
        colocate: Engines share the training ranks' GPUs: weights pass as handles to GPU memory, and engines
            :meth:`sleep` during training (``RolloutCallback`` calls it). Else engines have devices of their own.
        sleep_level: vLLM's level for :meth:`sleep`: 1 moves the weights to main memory, 2 drops them until the next
            :meth:`load`.
        dtype: Type the engines compute in, e.g. ``"bfloat16"``; ``None``: the type of the weights they are sent.
        gpu_memory_utilization: Share of a GPU's memory that vLLM may use (vLLM's default is 0.92); ``None``: 0.9, and
            0.5 when colocated.
        kv_cache_gib: Size of the key-value cache in GiB; ``None``: what is left of ``gpu_memory_utilization``, and 1
            GiB on a CPU.
        cpus_per_engine: Cores of an engine; on a CPU also its number of threads.
        device: ``"cpu"`` or ``"cuda"``; ``None``: GPUs if Ray's cluster has any.
        engine_arguments: Other arguments of ``vllm.EngineArgs``, except those on numbers of processes; they override
            ours.
        environment: Environment variables of the engines.
        start_timeout: Seconds for all engines to be ready.
        generate_timeout: Seconds without any request of a batch being finished.
        sync_timeout: Seconds for each step of a weight transfer, and for each bucket.
        transfer: How weights get to the engines. ``"auto"``: gloo on CPUs, IPC when colocated, NCCL between GPUs.
            ``"nccl"``: from GPU to GPU. ``"gloo"``: through main memory, slower, also for GPUs where the others fail.
            ``"ipc"``: handles to GPU memory, when colocated.
        bucket_bytes: Bytes per broadcast of a weight transfer; ``None``: 64 MiB through main memory, 512 MiB between
            GPUs. While weights are sent, rank 0 and each process of an engine have two such blocks, or, where one is
            larger, the process has one tensor instead. Engines have them beside ``gpu_memory_utilization``.
        quantization: Engines compute in 8 bits, with the weights of every sync quantized by vLLM: ``"fp8"`` (that is
            ``"fp8_per_channel"``), ``"fp8_per_tensor"``, ``"fp8_per_block"`` or ``"mxfp8"``. Samples then come from
            another distribution than the policy's; modules correct for it (truncated importance sampling) by default.
        lora: How a policy with a LoRA adapter is sent: ``"adapter"``: its matrices alone, which engines apply in vLLM's
            LoRA slots, the weights under them once; ``"merge"``: the merged weights at every sync; ``"auto"``: the
            first where engines can (not with ``colocate``), which is logged.
        health: How engines are probed, and how often they are restarted.

    Raises:
        ValueError: If an argument is out of range.
    """

    shared = True
    updates_in_flight = True
    continuous_batching = True
    can_stream = True
    colocate = False
    max_model_len: int | None = None

    def __init__(
        self,
        num_engines: int = 1,
        tensor_parallel_size: int = 1,
        *,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int = 1,
        expert_parallel: bool = False,
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
        transfer: str = "auto",
        bucket_bytes: int | None = None,
        quantization: str | None = None,
        lora: Literal["auto", "adapter", "merge"] = "auto",
        health: HealthPolicy | None = None,
    ) -> None:
        self.parallelism = Parallelism(
            tensor_parallel_size, pipeline_parallel_size, data_parallel_size, expert_parallel
        )
        check_integer("num_engines", num_engines, minimum=1)
        check_integer("cpus_per_engine", cpus_per_engine, minimum=1)
        check_integer("bucket_bytes", bucket_bytes, minimum=1, optional=True)
        check_number("start_timeout", start_timeout, above=0, why="it is in seconds")
        check_number("generate_timeout", generate_timeout, above=0, why="it is in seconds")
        check_number("sync_timeout", sync_timeout, above=0, why="it is in seconds")
        check_integer("sleep_level", sleep_level, minimum=1, maximum=2)
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be None, 'cpu' or 'cuda', got {device!r}")
        self.num_engines = num_engines
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
        check_integer("max_model_len", max_model_len, minimum=2, optional=True)
        check_number("gpu_memory_utilization", gpu_memory_utilization, above=0, maximum=1, optional=True)
        check_number("kv_cache_gib", kv_cache_gib, above=0, optional=True)
        self.parallelism.check_engine_arguments(engine_arguments or {})
        if (engine_arguments or {}).get("enable_lora"):
            raise ValueError(
                "VLLMPool(engine_arguments=...) must leave enable_lora out: engines have a LoRA slot if the policy has "
                "an adapter that they can apply, see VLLMPool(lora=...)"
            )
        check_quantization(quantization)
        self.quantization = quantization
        if lora not in ("auto", "adapter", "merge"):
            raise ValueError(f"VLLMPool(lora=...) must be 'auto', 'adapter' or 'merge', got {lora!r}")
        if lora == "adapter" and colocate:
            raise ValueError("VLLMPool(lora='adapter') cannot be combined with colocate=True: use lora='merge'")
        self.lora = lora
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.gpu_memory_utilization = gpu_memory_utilization or (0.5 if colocate else 0.9)
        self.kv_cache_gib = kv_cache_gib
        self.engine_arguments = dict(engine_arguments or {})
        self.environment = dict(environment or {})
        self._stop_token_ids: tuple[int, ...] = ()  # end-of-sequence tokens of the model
        self._same_vocabulary = True  # of the run's tokenizer and the model's own, which vLLM has
        self._logprobs_mode = self.engine_arguments.get("logprobs_mode", "processed_logprobs")
        self._unscaled = False  # whether samples are drawn at temperature 1, or greedily
        self._images: ImageRequests | None = None  # None: the model reads text only
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
        """The tokenizer in use, which writes the texts of samples; set by :meth:`prepare_requests`."""
        self._started = False
        self._loading = False
        self._asleep = False
        self._sync: WeightSyncCoordinator | None = None
        self._dedicated: DedicatedPlacement | None = None  # devices that are held for the engines, on rank 0
        self._gpu_note = ""  # for an error about too few GPUs
        self._joined: JoinedRay | None = None  # on other ranks
        self._store: RankStore | None = None

    @property
    def processes_per_engine(self) -> int:
        """Processes of an engine that hold weights, each with a device of its own."""
        return self.parallelism.processes

    @property
    def spans_machines(self) -> bool:
        """Whether an engine may be on several machines: not if it has data-parallel replicas, nor when colocated."""
        return self.parallelism.data == 1 and not self.colocate

    @property
    def quantized(self) -> bool:
        """Whether engines compute with quantized weights."""
        return self.quantization is not None or self.engine_arguments.get("quantization") is not None

    def configure_weights(self, weights: WeightSource) -> None:
        """Decide whether engines apply a policy's LoRA adapter themselves; see ``lora``.

        Raises:
            ValueError: If ``lora="adapter"`` and they cannot.
        """
        if self._started or self.lora == "merge":
            return
        self.adapter = None
        try:
            settings = weights.adapter_settings()
            if settings is None and self.lora == "adapter":
                raise ValueError("the policy has no LoRA adapter")
            if settings is not None:
                adapter_arguments(settings)  # raises if its rank is too large
                if self.colocate:
                    raise ValueError("engines on the ranks' GPUs take whole weights")
            self.adapter = settings
        except ValueError as error:
            if self.lora == "adapter":
                raise ValueError(f"VLLMPool(lora='adapter') is not possible: {error}") from error
            log.warning("the LoRA adapter is merged at every sync: %s", error)
        self.may_send_adapter = self.adapter is not None

    # ---------------------------------------------------------------- start and end

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.given_tokenizer = tokenizer

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Start the engines, on rank 0, and connect the other ranks to them. Called on every rank.

        Raises:
            ImportError: If Ray or vLLM is not installed.
            EngineError: If the cluster is too small, an engine cannot start, ``start_timeout`` has passed, or a rank's
                machine is not part of rank 0's Ray cluster.
        """
        if self._started:
            return
        # Engines with the model's own weights and devices of their own do not depend on where the ranks are.
        alone = load_weights and not self.colocate
        ranks = [] if alone else gather_objects(locate_rank(colocate=self.colocate))
        self._store = store = rank_store()
        rank_log = store.log("engines/start")
        start = partial(self._start, model, dtype, trust_remote_code, load_weights, ranks, rank_log)
        connect = partial(self._connect, model, trust_remote_code, rank_log)
        try:
            # Ranks wait on the store, as engines may take longer to start than the process group's time limit.
            rank_log.run(
                start if store.rank == 0 else connect,
                timeout=2 * self.start_timeout + _CONNECT_SECONDS,  # for room in the cluster, then for the engines
                waiting_for="the engines of VLLMPool to start",
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
        rank_log: RankLog,
    ) -> None:
        """Start the engines, and tell the other ranks how to reach them."""
        self.prepare_requests(model, trust_remote_code)
        self.start_engines(model, dtype, trust_remote_code, load_weights, ranks)
        assert self.engines is not None
        assert self.sender is not None
        kinds = [handle.info.get("gpus", ()) for handle in self.engines.handles]
        mixed = mixed_engine_kinds(kinds, [rank.kind for rank in ranks])
        if mixed is not None:
            log.warning("%s", mixed)
        # After a failed call, the multi-process executor of vLLM 0.32 leaves answers of other workers unread and
        # takes them for those of later calls, so an engine of several processes cannot be used any more.
        recoverable = self.sender.recoverable and self.processes_per_engine == 1
        self._sync = WeightSyncCoordinator(self.engines, self.sender, recoverable=recoverable)
        if rank_log.store.world_size > 1:
            rank_log.append((this_cluster(), self.engines.table_name))

    def _connect(self, model: str, trust_remote_code: bool, rank_log: RankLog) -> None:
        """Wait for rank 0's engines and connect to them."""
        self.prepare_requests(model, trust_remote_code)
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if self.resolve_transfer(device) == "ipc":  # the only one with a part for every rank
            self.sender = make_sender("ipc", timeout=self.sync_timeout, bucket_bytes=self.bucket_bytes)
        entries: list[tuple[int, Any]] = []
        while not entries:
            entries = rank_log.read(1.0)
        cluster, table_name = entries[0][1]
        try:
            self._joined = JoinedRay(cluster, member=f"rank {rank_log.store.rank}")
        except RuntimeError as error:
            raise EngineError(str(error)) from error
        self.engines = Engines.join(table_name, rank=rank_log.store.rank, num_ranks=rank_log.store.world_size)

    def start_engines(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool, ranks: list[RankLocation]
    ) -> None:
        """Set :attr:`engines`, started vLLM actors, and :attr:`sender`; called on rank 0.

        If vLLM's model takes no adapter (``lora="auto"``), engines are started again without.
        """
        try:
            self._start_engines(model, dtype, trust_remote_code, load_weights, ranks)
        except EngineError as error:
            if self.adapter is None or self.lora == "adapter" or NO_LORA not in str(error):
                raise
            log.warning("the LoRA adapter is merged at every sync: %s", error)
            self.adapter = None
            self._start_engines(model, dtype, trust_remote_code, load_weights, ranks)
        if self.adapter is not None:
            from lightning.pytorch.utilities import rank_zero_info

            rank_zero_info(
                "Engines apply the LoRA adapter: syncs send its matrices alone (VLLMPool(lora='merge') merges)."
            )

    def _start_engines(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool, ranks: list[RankLocation]
    ) -> None:
        device = self.connect_to_ray(ranks)
        self.parallelism.check_device(device)
        transfer = self.resolve_transfer(device)
        self.sender = make_sender(transfer, timeout=self.sync_timeout, bucket_bytes=self.bucket_bytes)
        in_process = device == "cpu" and self.processes_per_engine == 1
        environment = engine_environment(
            device=device,
            cpus_per_engine=self.cpus_per_engine,
            in_process=in_process,
            backend=self.sender.backend,
        )
        arguments = engine_arguments(
            model,
            dtype=self.dtype or dtype,
            trust_remote_code=trust_remote_code,
            parallelism=self.parallelism,
            max_model_len=self.max_model_len,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_gib=self.kv_cache_gib,
            device=device,
            backend=self.sender.backend,
            load_weights=load_weights,
            sleeps=self.colocate,
            logprobs_mode=self._logprobs_mode,
        ) | quantization_arguments(self.quantization, self.dtype or dtype)
        if self.adapter is not None:
            arguments |= adapter_arguments(self.adapter)
        if self._images is not None:
            arguments |= self._images.engine_arguments
        arguments |= self.engine_arguments
        create_actor = ActorLauncher(
            self.placements(device, ranks),
            arguments,
            in_process=in_process,
            environment=environment | self.environment,
            weight_bytes=self.parallelism.weight_bytes(arguments) if device == "cuda" else 0.0,
        )
        self.engines = Engines.start(self.settings(load_weights), create_actor, num_ranks=get_world_size())

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
            raise RuntimeError("VLLMPool.load was called before VLLMPool.start")
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
        return (weights.adapter_apart(with_base=with_base) if apart else whole), total

    def _engines_apply(self, weights: WeightSource) -> bool:
        """Whether the weights have the adapter for which the engines were started; known on rank 0."""
        if self.adapter is None:
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

    # ---------------------------------------------------------------- requests

    def check_model(self, model: str, *, trust_remote_code: bool = False) -> None:
        """Check that vLLM is here and can run the model.

        Raises:
            ImportError: If Ray or vLLM is missing.
            EngineError: If the model cannot be divided over an engine's processes, or vLLM's build for CPUs cannot
                compute its attention.
        """
        _require_packages()
        from rlhfkit.models.load import load_config

        on_cpu = self.device == "cpu" or (self.device is None and has_cpu_build())
        if not on_cpu and self.processes_per_engine == 1:
            return  # vLLM may know models that Transformers does not
        config = load_config(model, trust_remote_code=trust_remote_code)
        if self.processes_per_engine > 1:
            self.parallelism.check_model(config)
        if on_cpu:
            check_head_size(config)

    def prepare_requests(self, model: str, trust_remote_code: bool) -> None:
        """Check the model, see :meth:`check_model`, and read its end-of-sequence tokens."""
        self.check_model(model, trust_remote_code=trust_remote_code)
        from rlhfkit.models.attention.families import sees_images
        from rlhfkit.models.load import load_config, load_tokenizer, stop_token_ids

        own = load_tokenizer(model, trust_remote_code=trust_remote_code)
        tokenizer = own if self.given_tokenizer is None else self.given_tokenizer
        self.tokenizer, self._same_vocabulary = tokenizer, own.get_vocab() == tokenizer.get_vocab()
        self._stop_token_ids = stop_token_ids(model, tokenizer, trust_remote_code=trust_remote_code)
        config = load_config(model, trust_remote_code=trust_remote_code)
        if sees_images(config):
            from rlhfkit.models.vision import vision_processor
            from rlhfkit.rollout.vllm.images import ImageRequests

            processor = vision_processor(model, config, trust_remote_code=trust_remote_code)
            self._images = ImageRequests(processor, tokenizer)
            if self._unscaled and "logprobs_mode" not in self.engine_arguments:
                self._logprobs_mode = "raw_logprobs"  # before the token that stands for images is taken out

    def make_request(
        self, prompt: Prompt, index: int, *, sampling: SamplingSpec, iteration: int, begun: Sample | None = None
    ) -> Request:
        """Return the request for one sample, with arguments of ``vllm.SamplingParams``."""
        request = sample_request(prompt, index, sampling, iteration, self._stop_token_ids, begun)
        return request if self._images is None else self._images.request(request, prompt.attachments)

    @property
    def image_processor(self) -> Any:
        return None if self._images is None else self._images.processor

    def resume_problem(self, sampling: SamplingSpec) -> str | None:
        """Why vLLM cannot continue samples of this kind; see :meth:`RolloutEngine.resume_problem`."""
        return vllm_resume_problem(sampling)

    def load_metrics(self) -> Mapping[str, float]:
        """Return ``engine/running`` and ``engine/waiting``, requests of a mean engine in a mean step since the last
        call, and ``engine/kv_cache``, the most of its key-value cache that any has used, 0 to 1. On rank 0.
        """
        loads = self.engines.load() if self.engines is not None and self._sync is not None else []
        if not loads:
            return {}
        means = {f"engine/{name}": fmean(load[name] for load in loads) for name in ("running", "waiting")}
        return means | {"engine/kv_cache": max(load["kv_cache"] for load in loads)}

    def configure_logprobs(self, sampling: SamplingSpec) -> bool:
        """Set vLLM's ``logprobs_mode`` for this sampling and return :meth:`knows_logprobs`.

        vLLM reports log-probs either before temperature and truncation or after both, fixed when it starts. So those of
        truncated samples are known only at temperature 1 (or 0), and only if this was called before :meth:`start`.
        """
        if not self._started and "logprobs_mode" not in self.engine_arguments:
            self._unscaled = sampling.temperature in (0.0, 1.0)
            raw = sampling.truncates and self._unscaled
            self._logprobs_mode = "raw_logprobs" if raw else "processed_logprobs"
        return self.knows_logprobs(sampling)

    def knows_logprobs(self, sampling: SamplingSpec) -> bool:
        """Whether vLLM reports log-probs at the sampling temperature before truncation.

        Never those of a completion with a form: its grammar removes tokens before vLLM takes them.
        """
        if sampling.constrained:
            return False
        if self._logprobs_mode == "raw_logprobs":
            return sampling.temperature in (0.0, 1.0)
        return not sampling.truncates

    # ---------------------------------------------------------------- sampling

    def _serving(self) -> Engines:
        """Return the engines; RuntimeError unless they have weights or are being sent some."""
        if self.engines is None:
            raise RuntimeError("the engines are not running: VLLMPool.start comes first (RolloutCallback calls it)")
        # Checked twice, as a load in another thread may end between the two checks.
        if self.version is None and not self._loading and self.version is None:
            raise RuntimeError(
                "the engines have no complete weights: none were loaded yet, they are asleep, or the last "
                "VLLMPool.load failed. RolloutCallback loads them; or call load() yourself"
            )
        if self._asleep and not self._loading:
            raise RuntimeError("the engines are asleep: call wake() on every rank first")
        return self.engines

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample on all engines, for this rank alone. Any thread.

        Raises:
            ValueError: If vLLM does not support these settings.
            RequestError: If a prompt exceeds the context or has unknown tokens, or a request is refused.
            WeightsNeededError: If no engine serves, and some wait for weights or are starting.
            EngineError: If all engines are dead, or nothing was finished for ``generate_timeout`` seconds.
            RankError: If rank 0, which manages the engines, is gone.
        """
        return sample_all(self.stream(sampling, iteration=iteration), prompts, tokenizer=self.tokenizer)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> PoolStream:
        """Return groups of this rank as they are finished. Any thread, several streams at a time.

        Raises:
            ValueError: If vLLM does not support these settings.
        """
        engines = self._serving()
        check_vllm_sampling(sampling, same_vocabulary=self._same_vocabulary)
        return PoolStream(
            engines,
            sampling,
            partial(self.make_request, sampling=sampling),
            self.generate_timeout,
            iteration=iteration,
            knows_logprobs=self.knows_logprobs(sampling),
            sees_images=self.image_processor is not None,
        )

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
            assert self._images is not None
            asked.append([self._images.sent(row, seen) for row, seen in zip(asked[0], images, strict=True)])
        scores = engines.call(State.SERVING, "score", *asked, doing="scoring sequences", timeout=self.generate_timeout)
        if not scores:
            raise EngineError(f"no {engines.engine_name} serves:\n{engines.report()}")
        return {f"engine {number}": found for number, found in scores.items()}


def _require_packages() -> None:
    """Raise ImportError, with the command to install them, if Ray or vLLM is missing."""
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"VLLMPool needs {' and '.join(missing)}, not installed here: pip install 'rlhfkit[rollout]' on a machine "
            "with GPUs, 'rlhfkit[cpu]' on one without; or use LocalEngine(), which needs neither"
        )
