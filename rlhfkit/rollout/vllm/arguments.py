"""What every engine of a pool is started with: arguments of ``vllm.EngineArgs`` and environment variables."""

import os
from typing import Any

import torch


def engine_arguments(
    model: str,
    *,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    tensor_parallel_size: int,
    max_model_len: int | None,
    gpu_memory_utilization: float,
    kv_cache_gib: float | None,
    device: str,
    backend: str,
    load_weights: bool,
    sleeps: bool,
    logprobs_mode: str,
) -> dict[str, Any]:
    """Arguments of ``vllm.EngineArgs``.

    Args:
        model: Folder or hub name.
        dtype: Type the engine computes in.
        trust_remote_code: Passed to Transformers.
        tensor_parallel_size: GPUs (processes on a CPU) per engine.
        max_model_len: Tokens of prompt and completion; ``None``: the model's context.
        gpu_memory_utilization: Share of a GPU's memory.
        kv_cache_gib: Size of the cache; ``None``: vLLM's choice, and 1 GiB on a CPU.
        device: ``"cpu"`` or ``"cuda"``.
        backend: Of the weight transfer.
        load_weights: Read the model's own weights; else they come with the first sync.
        sleeps: Whether it gives GPU memory back in between.
        logprobs_mode: ``"processed_logprobs"``: of the distribution that is sampled from, after temperature and
            truncation. ``"raw_logprobs"``: of the model, before both. vLLM gives one of them.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "trust_remote_code": trust_remote_code,
        "tensor_parallel_size": tensor_parallel_size,
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        "seed": 0,
        "disable_log_stats": True,
        "logprobs_mode": logprobs_mode,
        # Nothing of the model's generation_config.json is applied behind our back; every request says everything.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": "rlhfkit.rollout.vllm.plugin.WorkerExtension",
    }
    kv_cache_gib = kv_cache_gib or (1.0 if device == "cpu" else None)
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if device == "cpu":
        arguments["enforce_eager"] = True  # compiling costs minutes there and gains little
        # When a part of a prompt fits into a step, vLLM 0.32 takes back the random number that it has drawn for it, by
        # an offset that generators on a CPU do not have ("CPU Generator does not use offset"), and the engine dies.
        arguments["enable_chunked_prefill"] = False
    elif sleeps:
        arguments["enable_sleep_mode"] = True
    if tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if not load_weights:
        arguments["load_format"] = "dummy"
    return arguments


def engine_environment(*, device: str, cpus_per_engine: int, in_process: bool, backend: str) -> dict[str, str]:
    """Environment variables of an engine; must be set before it imports torch.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        cpus_per_engine: OpenMP threads on a CPU.
        in_process: Whether vLLM starts no processes of its own.
        backend: Of the weight transfer.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables |= {
            "OMP_NUM_THREADS": str(cpus_per_engine),
            # Each weight update frees the model layer by layer and packs the next. Memory that the operating system has
            # to hand out anew is two to three times as slow as what the C library (glibc) has kept.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**32),
            "MALLOC_TOP_PAD_": str(2**26),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM 0.32 compiles one function of its log-probs even with enforce_eager: 30 s for nothing.
            "TORCHDYNAMO_DISABLE": "1",
        }
    if in_process:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if backend == "ipc":
        # vLLM takes handles to GPU memory only so; they come from the trainer, over Ray, within one machine.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return variables
