"""``VLLMPool``: several vLLM engines in Ray actors that look like one engine."""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlhfkit.argument_names import AnswersNames
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import get_world_size
from rlhfkit.rollout.engine import AdapterSource, SamplingSpec, WeightSource
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.remote.placement import RankLocation
from rlhfkit.rollout.remote.pool import RemoteEnginePool
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import HealthPolicy
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
from rlhfkit.rollout.weight_sync.transfers import make_sender
from rlhfkit.validation import check_integer, check_number

if TYPE_CHECKING:
    from rlhfkit.rollout.vllm.images import ImageRequests

log = logging.getLogger(__name__)


class _EngineNames(AnswersNames, type(RemoteEnginePool)):  # type: ignore[misc]  # a protocol's metaclass
    """Answers wrong names of arguments of an engine."""


class VLLMPool(RemoteEnginePool, metaclass=_EngineNames):
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
        super().__init__(
            num_engines,
            self.parallelism.processes,
            colocate=colocate,
            sleep_level=sleep_level,
            cpus_per_engine=cpus_per_engine,
            device=device,
            start_timeout=start_timeout,
            generate_timeout=generate_timeout,
            sync_timeout=sync_timeout,
            transfer=transfer,
            bucket_bytes=bucket_bytes,
            health=health,
        )
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
            self.adapter = self._adapter_of(weights)
        except ValueError as error:
            if self.lora == "adapter":
                raise ValueError(f"VLLMPool(lora='adapter') is not possible: {error}") from error
            log.warning("the LoRA adapter is merged at every sync: %s", error)
        self.may_send_adapter = self.adapter is not None

    def _adapter_of(self, weights: WeightSource) -> dict[str, Any] | None:
        settings = weights.adapter_settings() if isinstance(weights, AdapterSource) else None
        if settings is None:
            if self.lora == "adapter":
                raise ValueError("the policy has no LoRA adapter")
            return None
        adapter_arguments(settings)  # raises if its rank is too large
        if self.colocate:
            raise ValueError("engines on the ranks' GPUs take whole weights")
        return settings

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
            self._merge_adapter(str(error))
            self._start_engines(model, dtype, trust_remote_code, load_weights, ranks)
        if self.adapter is not None:
            from lightning.pytorch.utilities import rank_zero_info

            rank_zero_info(
                "Engines apply the LoRA adapter: syncs send its matrices alone (VLLMPool(lora='merge') merges)."
            )

    def _merge_adapter(self, reason: str) -> None:
        if self.lora == "adapter":
            raise EngineError(f"VLLMPool(lora='adapter') is not possible: {reason}")
        log.warning("the LoRA adapter is merged at every sync: %s", reason)
        self.adapter = None

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
        if self.adapter is not None and self.sender.backend == "ipc":
            self._merge_adapter("vLLM's own ipc transfer takes weights only")
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

    # ---------------------------------------------------------------- sampling

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

    def sent_images(self, sequence: Sequence[int], images: Sequence[Any]) -> Any:
        """What the engines' ``score`` is given for a sequence with images."""
        assert self._images is not None
        return self._images.sent(sequence, images)

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

    def check_sampling(self, sampling: SamplingSpec) -> None:
        """Raise ValueError if vLLM cannot sample so, see :func:`check_vllm_sampling`."""
        check_vllm_sampling(sampling, same_vocabulary=self._same_vocabulary)

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


def _require_packages() -> None:
    """Raise ImportError, with the command to install them, if Ray or vLLM is missing."""
    missing = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"VLLMPool needs {' and '.join(missing)}, not installed here: pip install 'rlhfkit[rollout]' on a machine "
            "with GPUs, 'rlhfkit[cpu]' on one without; or use LocalEngine(), which needs neither"
        )
