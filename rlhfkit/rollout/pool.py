"""``VLLMPool``: several vLLM engines in Ray actors that look like one engine.

The pool is shared: every rank of the training holds one, rank 0's owns the actors. ``start``, ``load`` and ``close``
are called by every rank, ``generate`` and ``score`` by rank 0. Whatever goes wrong in ``start`` or ``load`` on one rank
is raised on all.

Samples do not depend on how many engines there are or which of them made what: each has a seed of its own.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfkit.data.experience import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, WeightInfo, WeightSource, check_context
from rlhfkit.rollout.fleet import EngineError, Fleet, join_or_start_ray, require_ray
from rlhfkit.rollout.nccl_sender import NcclSender
from rlhfkit.rollout.routing import run_jobs, sample_request, split_into_jobs
from rlhfkit.rollout.senders import GlooSender, WeightSender
from rlhfkit.rollout.transfer import DEFAULT_BUCKET_BYTES
from rlhfkit.rollout.vllm_actor import Completion

# vLLM 0.32 takes temperatures up to 2 and silently raises those below 0.01.
_TEMPERATURES = (0.01, 2.0)


class VLLMPool:
    """N vLLM engines as one :class:`~rlhfkit.rollout.engine.RolloutEngine`.

    Ray is joined when this process is connected to it already or ``RAY_ADDRESS`` is set, and started on this machine
    otherwise. Nothing is started before :meth:`start`.

    Example::

        RolloutCallback(engine=VLLMPool(num_engines=2), reward=math_match)

    Args:
        num_engines: Engines.
        tensor_parallel_size: GPUs (on a CPU: processes) per engine.
        max_model_len: Tokens of prompt and completion; ``None``: the model's context.
        dtype: Type the engines compute in, e.g. ``"bfloat16"``; ``None``: the type of the weights they are sent.
        gpu_memory_utilization: Share of a GPU's memory that vLLM may use (vLLM's default is 0.92).
        kv_cache_gib: Size of the cache of keys and values in GiB; ``None``: what is left of ``gpu_memory_utilization``,
            and 1 GiB on a CPU.
        cpus_per_engine: Cores of an engine; on a CPU also its number of threads.
        device: ``"cpu"`` or ``"cuda"``; ``None``: GPUs if Ray's cluster has any.
        engine_arguments: Any other argument of ``vllm.EngineArgs``; wins over ours.
        environment: Environment variables of the engines.
        start_timeout: Seconds for all engines to be ready.
        generate_timeout: Seconds without any request of a batch being finished.
        sync_timeout: Seconds for each step of a weight transfer.
        probe_tolerance: Largest difference between the engines' log-probs of one sequence that :meth:`score` accepts.
        bucket_bytes: Bytes per broadcast of a weight transfer.

    Raises:
        ValueError: If a number is out of range.
    """

    shared = True

    def __init__(
        self,
        num_engines: int = 1,
        tensor_parallel_size: int = 1,
        *,
        max_model_len: int | None = None,
        dtype: str | None = None,
        gpu_memory_utilization: float = 0.9,
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
    ) -> None:
        rules: list[tuple[str, Any, bool, str]] = [
            ("num_engines", num_engines, num_engines >= 1, "at least 1"),
            ("tensor_parallel_size", tensor_parallel_size, tensor_parallel_size >= 1, "at least 1"),
            ("max_model_len", max_model_len, max_model_len is None or max_model_len >= 2, "None or at least 2"),
            ("gpu_memory_utilization", gpu_memory_utilization, 0 < gpu_memory_utilization <= 1, "in (0, 1]"),
            ("kv_cache_gib", kv_cache_gib, kv_cache_gib is None or kv_cache_gib > 0, "None or more than 0"),
            ("cpus_per_engine", cpus_per_engine, cpus_per_engine >= 1, "at least 1"),
            ("device", device, device in (None, "cpu", "cuda"), "None, 'cpu' or 'cuda'"),
            ("start_timeout", start_timeout, start_timeout > 0, "more than 0 seconds"),
            ("generate_timeout", generate_timeout, generate_timeout > 0, "more than 0 seconds"),
            ("sync_timeout", sync_timeout, sync_timeout > 0, "more than 0 seconds"),
            ("probe_tolerance", probe_tolerance, probe_tolerance >= 0, "0 or more"),
            ("bucket_bytes", bucket_bytes, bucket_bytes >= 1, "at least 1"),
        ]
        for name, value, holds, rule in rules:
            if not holds:
                raise ValueError(f"VLLMPool({name}=...) must be {rule}, got {value!r}")
        self.num_engines = num_engines
        self.tensor_parallel_size = tensor_parallel_size
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.gpu_memory_utilization = gpu_memory_utilization
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
        self.version: int | None = None
        self._started = False
        self._fleet: Fleet | None = None
        self._sender: WeightSender | None = None
        self._sender_state = "apart"  # "apart", "connected", or "broken": a transfer was cut off
        self._stops: tuple[int, ...] = ()

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
        error: Exception | None = None
        if _rank() == 0:
            try:
                self._start(model, dtype, trust_remote_code, load_weights)
            except Exception as caught:
                error = caught
        _, error = _agree(error)
        if error is not None:
            raise error
        self._started = True
        self.version = 0 if load_weights else None

    def _start(self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool) -> None:
        ray = require_ray()
        from rlhfkit.models.load import load_tokenizer, stop_token_ids

        tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
        self._stops = stop_token_ids(model, tokenizer, trust_remote_code=trust_remote_code)
        processes = self.num_engines * self.tensor_parallel_size
        join_or_start_ray(num_cpus=processes * self.cpus_per_engine, num_gpus=0 if self.device == "cpu" else processes)
        device = self.device or ("cuda" if ray.cluster_resources().get("GPU", 0) else "cpu")
        self._sender = (
            NcclSender(bucket_bytes=self.bucket_bytes)
            if device == "cuda"
            else GlooSender(timeout=self.sync_timeout, bucket_bytes=self.bucket_bytes)
        )
        self._fleet = Fleet(
            num_engines=self.num_engines,
            tensor_parallel_size=self.tensor_parallel_size,
            cpus_per_engine=self.cpus_per_engine,
            device=device,
            environment=self.environment,
            sync_timeout=self.sync_timeout,
        )
        self._arguments = self._engine_arguments(model, dtype, trust_remote_code, device, self._sender.backend)
        if not load_weights:
            self._arguments = {"load_format": "dummy"} | self._arguments  # weights come with the first load()
        self._fleet.start(self._arguments, self.start_timeout)

    def _engine_arguments(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, device: str, backend: str
    ) -> dict[str, Any]:
        """Arguments of ``vllm.EngineArgs``."""
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": self.dtype or str(dtype).removeprefix("torch."),
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_model_len": self.max_model_len,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "seed": 0,
            "disable_log_stats": True,
            # Log-probs of the distribution that was sampled from: after temperature and truncation.
            "logprobs_mode": "processed_logprobs",
            # Nothing of the model's generation_config.json is applied behind our back; every request says everything.
            "generation_config": "vllm",
            "weight_transfer_config": {"backend": backend},
            "worker_extension_cls": "rlhfkit.rollout.vllm_plugin.WorkerExtension",
        }
        kv_cache_gib = self.kv_cache_gib or (1.0 if device == "cpu" else None)
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
        if device == "cpu":
            arguments["enforce_eager"] = True  # compiling costs minutes there and gains little
        if self.tensor_parallel_size > 1:
            arguments["distributed_executor_backend"] = "mp"
        return arguments | self.engine_arguments

    def close(self) -> None:
        """End the engines; :meth:`start` may be called again. A Ray started by this process stays until it ends."""
        if self._sender is not None:
            self._sender.close()
        if self._fleet is not None:
            self._fleet.kill()
        self._fleet, self._sender, self._sender_state = None, None, "apart"
        self._started, self.version = False, None

    def sleep(self) -> None:
        """Let the engines give up GPU memory, if ``engine_arguments`` has ``enable_sleep_mode``."""
        self._if_sleep_mode("sleep", 1)

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._if_sleep_mode("wake")

    def _if_sleep_mode(self, method: str, *args: Any) -> None:
        if self._fleet is not None and self._fleet.device == "cuda" and self.engine_arguments.get("enable_sleep_mode"):
            self._fleet.submit(method, *args, doing=f"{method}()", timeout=self.sync_timeout).result()

    def _serving(self) -> Fleet:
        """The fleet, if it has weights to serve."""
        if _rank() != 0:
            raise RuntimeError(f"only rank 0 may ask the engines, as they are shared; this is rank {_rank()}")
        if self._fleet is None:
            raise RuntimeError("the engines are not running: VLLMPool.start comes first (RolloutCallback calls it)")
        if self.version is None:
            raise RuntimeError(
                "the engines have no complete weights: none were published yet, or the last VLLMPool.load failed. "
                "RolloutCallback publishes them; or call load() yourself"
            )
        return self._fleet

    # ---------------------------------------------------------------- weights

    def load(self, weights: WeightSource, version: int) -> None:
        """Send the weights to all engines; see :meth:`RolloutEngine.load`. Every rank calls it.

        While it runs, and after it failed, ``version`` is ``None`` and nothing is served. A source that refuses to
        yield (weights that are not finite) leaves the engines and their version as they were.

        Raises:
            EngineError: If an engine died or did not confirm within ``sync_timeout``; on every rank.
        """
        if not self._started:
            raise RuntimeError("VLLMPool.load was called before VLLMPool.start")
        error: Exception | None = None
        touched = False
        stream = iter(weights)
        try:
            first = list(itertools.islice(stream, 1))  # the source's own checks run now, before any engine is touched
            touched = True
            if _rank() == 0:
                self._publish(weights.metadata(), itertools.chain(first, stream), version)
        except Exception as caught:
            error = caught
        try:
            for _ in stream:  # every rank draws to the end, also after a failure: the others wait in its collectives
                pass
        except Exception as caught:
            error = error or caught
        touched, error = _agree(error, touched)
        if touched:
            self.version = None if error is not None else version
        if error is not None:
            raise error

    def _publish(self, infos: list[WeightInfo], weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Rank 0's part of :meth:`load`: pause, begin, send, finish, resume."""
        fleet, sender, limit = self._fleet, self._sender, self.sync_timeout
        assert fleet is not None
        assert sender is not None
        self.version = None
        if self._sender_state == "broken":
            self._recover(fleet, sender)
        try:
            if self._sender_state == "apart":
                sender.connect(fleet)
            self._sender_state = "broken"  # until proven otherwise
            fleet.submit("begin_update", doing="pausing for new weights", timeout=limit).result()
            sender.send(fleet, infos, weights)
            fleet.submit("finish_update", version, doing="finishing the weight update", timeout=limit).result()
            fleet.submit("resume", doing="resuming after the weight update", timeout=limit).result()
        except BaseException:
            self._sender_state = "broken"
            sender.close()  # workers that wait for data fail now, not when their time is up
            raise
        self._sender_state = "connected"

    def _recover(self, fleet: Fleet, sender: WeightSender) -> None:
        """Make engines whose last transfer broke off ready for another."""
        sender.close()
        # After a failed call, the multi-process executor of vLLM 0.32 leaves answers of other workers unread and takes
        # them for those of later calls, so an engine of several processes cannot be trusted any more.
        if sender.recoverable and self.tensor_parallel_size == 1:
            fleet.submit("abandon_update", doing="closing a broken update", timeout=self.sync_timeout).result()
        else:
            fleet.kill()
            fleet.start(self._arguments, self.start_timeout)
        self._sender_state = "apart"

    # ---------------------------------------------------------------- sampling

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample on whichever engine has the least to do; see :meth:`RolloutEngine.generate`. Rank 0 only.

        Raises:
            ValueError: If a prompt leaves no room in the context, or vLLM cannot sample at this temperature.
            EngineError: If an engine died, or nothing was finished for ``generate_timeout`` seconds.
        """
        fleet = self._serving()
        low, high = _TEMPERATURES
        if sampling.temperature > high or 0 < sampling.temperature < low:
            raise ValueError(
                f"vLLM samples at temperature 0 (greedy) or {low} to {high}, got SamplingSpec.temperature="
                f"{sampling.temperature}"
            )
        check_context(prompts, sampling.max_new_tokens, fleet.max_model_len)
        jobs = split_into_jobs(len(prompts), sampling.group_size, len(fleet.actors))
        requests = [
            [sample_request(prompts[row], index, sampling, iteration, self._stops) for index in indices]
            for row, indices in jobs
        ]
        completions = run_jobs(fleet, requests, self.generate_timeout)
        samples: dict[tuple[int, int], Sample] = {}
        for (row, indices), made in zip(jobs, completions, strict=True):
            for index, completion in zip(indices, made, strict=True):
                samples[row, index] = self._sample(prompts[row], index, completion)
        return [samples[row, index] for row in range(len(prompts)) for index in range(sampling.group_size)]

    def _sample(self, prompt: Prompt, index: int, completion: Completion) -> Sample:
        """A completion as a record."""
        token_ids, logprobs, finish, spans = completion
        if finish not in ("stop", "length"):
            raise EngineError(f"vLLM ended sample {index} of prompt {prompt.index} with {finish!r}")
        versions = [self.version or 0] * len(token_ids)
        for label, start, end in spans:
            versions[start:end] = [int(label)] * (end - start)
        return Sample(prompt, index, token_ids, logprobs, versions, "stop" if finish == "stop" else "length")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of given tokens; see :meth:`RolloutEngine.score`. Rank 0 only.

        Every engine scores all of them, and they must agree: weights that went wrong in one engine only are noticed.

        Raises:
            ValueError: If a sequence has fewer than 2 tokens or does not fit into the context.
            EngineError: If engines differ by more than ``probe_tolerance``, died, or took too long.
        """
        fleet = self._serving()
        for sequence in sequences:
            if not 2 <= len(sequence) < fleet.max_model_len:
                raise ValueError(
                    f"score() takes sequences of 2 to {fleet.max_model_len - 1} tokens (vLLM samples one more), got "
                    f"one of {len(sequence)}"
                )
        rows = [list(sequence) for sequence in sequences]
        scores = fleet.submit("score", rows, doing="scoring sequences", timeout=self.generate_timeout).result()
        for engine, other in enumerate(scores[1:], start=1):
            pairs = itertools.chain.from_iterable(zip(a, b, strict=True) for a, b in zip(scores[0], other, strict=True))
            difference = max((abs(a - b) for a, b in pairs), default=0.0)
            if not difference <= self.probe_tolerance:  # true for NaN as well
                raise EngineError(
                    f"engines 0 and {engine} serve different weights: their log-probs of the same tokens differ by "
                    f"{difference:.3g}, more than VLLMPool(probe_tolerance={self.probe_tolerance:g})"
                )
        return scores[0]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _agree(error: Exception | None, flag: bool = False) -> tuple[bool, Exception | None]:
    """Exchange the outcome of all ranks. A collective.

    Returns:
        Rank 0's flag, and an error if any rank has one: its own, or else one that quotes the first that has.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return flag, error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (flag, None if error is None else f"{type(error).__name__}: {error}"))
    for rank, (_, text) in enumerate(outcomes):
        if text is not None and error is None:
            error = EngineError(f"rank {rank} failed: {text}")
    return outcomes[0][0], error
