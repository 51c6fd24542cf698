"""What vLLM is given: arguments of ``EngineArgs`` and of ``SamplingParams``, and environment variables."""

import contextlib
import importlib.metadata
import os
from typing import Any

import torch

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec, sample_seed
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.supervision.calls import Request
from rlhfkit.rollout.vllm.parallelism import Parallelism

# vLLM 0.32 takes temperatures up to 2 and silently raises those below 0.01.
_TEMPERATURES = (0.01, 2.0)

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's attention on CPUs (``CPUAttentionBackend.get_supported_head_sizes()``)."""


def engine_arguments(
    model: str,
    *,
    dtype: str | torch.dtype,
    trust_remote_code: bool,
    parallelism: Parallelism,
    max_model_len: int | None,
    gpu_memory_utilization: float,
    kv_cache_gib: float | None,
    device: str,
    backend: str,
    load_weights: bool,
    sleeps: bool,
    logprobs_mode: str,
) -> dict[str, Any]:
    """Build the arguments of ``vllm.EngineArgs``, mostly from those of :class:`~rlhfkit.VLLMPool`.

    ``backend`` is that of the weight transfer. ``load_weights``: read the model's own; otherwise they come with the
    first sync. ``logprobs_mode``: ``"processed_logprobs"`` after temperature and truncation, ``"raw_logprobs"`` before
    both.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "trust_remote_code": trust_remote_code,
        **parallelism.arguments(),
        "max_model_len": max_model_len,
        "gpu_memory_utilization": gpu_memory_utilization,
        "seed": 0,
        "disable_log_stats": True,
        "logprobs_mode": logprobs_mode,
        # Ignore the model's generation_config.json; every request sets all sampling parameters.
        "generation_config": "vllm",
        "scheduling_policy": "priority",
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": "rlhfkit.rollout.vllm.plugin.WorkerExtension",
    }
    kv_cache_gib = kv_cache_gib or (1.0 if device == "cpu" else None)
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if device == "cpu":
        arguments["enforce_eager"] = True  # compiling takes minutes there and gains little
        # When only a part of a prompt fits into a step, vLLM 0.32 rewinds the random generator by an offset, which CPU
        # generators do not have ("CPU Generator does not use offset"), and the engine dies.
        arguments["enable_chunked_prefill"] = False
    elif sleeps:
        arguments["enable_sleep_mode"] = True
    if not load_weights:
        arguments["load_format"] = "dummy"
    return arguments


def engine_environment(*, device: str, cpus_per_engine: int, in_process: bool, backend: str) -> dict[str, str]:
    """Build the environment variables of an engine; they must be set before it imports torch.

    ``cpus_per_engine`` sets OpenMP threads on a CPU; ``in_process``: vLLM starts no processes of its own.
    """
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        variables |= {
            "OMP_NUM_THREADS": str(cpus_per_engine),
            # Each weight update frees the model layer by layer and packs the new one. Memory that glibc has kept is two
            # to three times as fast as new memory of the operating system.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**32),
            "MALLOC_TOP_PAD_": str(2**26),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM 0.32 compiles one function of its log-probs even with enforce_eager, which takes 30 s.
            "TORCHDYNAMO_DISABLE": "1",
        }
    if in_process:
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if backend == "ipc":
        # vLLM needs this for handles to GPU memory; they come from the trainer, over Ray, within one machine.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return variables


def sample_request(
    prompt: Prompt,
    index: int,
    spec: SamplingSpec,
    iteration: int,
    stops: tuple[int, ...],
    begun: Sample | None = None,
) -> Request:
    """Build the request for sample ``index`` of a group, leaving nothing that matters to vLLM's defaults.

    ``stops`` are the model's end-of-sequence tokens; ``begun`` is what the sample continues.
    """
    form = {"regex": spec.regex} if spec.regex is not None else {"json": spec.json_schema}
    before = [] if begun is None else begun.token_ids.tolist()
    return prompt.token_ids.tolist() + before, {
        "n": 1,
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "min_p": spec.min_p,
        "presence_penalty": spec.presence_penalty,
        "frequency_penalty": spec.frequency_penalty,
        "repetition_penalty": spec.repetition_penalty,
        "seed": sample_seed(spec.seed, iteration, prompt.index, index),
        "max_tokens": spec.max_new_tokens - len(before),
        "min_tokens": max(0, spec.min_new_tokens - len(before)),
        "stop": list(spec.stop),
        "stop_token_ids": [*stops, *spec.stop_token_ids],
        "ignore_eos": True,  # the end-of-sequence tokens are among the stop tokens
        "logprobs": 0,  # that of the sampled token only
        "detokenize": bool(spec.stop),  # needed only to find stop texts
        "skip_special_tokens": True,
        # What dynamic sampling draws late for an iteration goes before the requests of the next one.
        "priority": iteration,
    } | ({"structured_outputs": form} if spec.constrained else {})


def vllm_resume_problem(spec: SamplingSpec) -> str | None:
    """Why vLLM cannot continue a sample, which it takes for a part of the prompt; ``None``: it can."""
    counted = {
        "presence_penalty": spec.presence_penalty != 0,
        "frequency_penalty": spec.frequency_penalty != 0,
        "stop": bool(spec.stop),
        "regex": spec.regex is not None,
        "json_schema": spec.json_schema is not None,
    }
    given = [name for name, is_given in counted.items() if is_given]
    if not given:
        return None
    return (
        f"vLLM would apply SamplingSpec({'=..., '.join(given)}=...) to what it adds alone, and not to the whole answer"
    )


def has_cpu_build() -> bool:
    """Whether the vLLM that is installed here was built for CPUs."""
    for name in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" in f"{name} {importlib.metadata.version(name)}"
    return False


def check_head_size(config: Any) -> None:
    """Raise EngineError if vLLM's kernels for CPUs have no attention for a model's heads.

    ``config`` is the Transformers configuration. Latent attention (``kv_lora_rank``) has kernels of its own.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or getattr(text, "kv_lora_rank", None):
        return
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    if size not in CPU_HEAD_SIZES:
        raise EngineError(
            f"vLLM's build for CPUs computes attention with heads of {', '.join(map(str, CPU_HEAD_SIZES))} numbers, and"
            f" those of {config.name_or_path or 'the model'} have {size}: use LocalEngine(), which takes every size, "
            "or GPUs"
        )


def check_vllm_sampling(sampling: SamplingSpec, *, same_vocabulary: bool = True) -> None:
    """Raise ValueError if vLLM cannot sample at the temperature, or finds texts with ``same_vocabulary=False``.

    vLLM has the tokenizer of the model's folder. It is given token ids and returns them, but finds stop texts and
    applies grammars by that tokenizer, which may have another vocabulary than the run's.
    """
    if not same_vocabulary and (sampling.stop or sampling.constrained):
        raise ValueError(
            "SamplingSpec.stop, regex and json_schema work by the tokenizer of the model's folder in vLLM, and the "
            "run's tokenizer has another vocabulary: save it with the model (tokenizer.save_pretrained) and train from "
            "that folder, or use SamplingSpec(stop_token_ids=...)"
        )
    low, high = _TEMPERATURES
    if sampling.temperature > high or 0 < sampling.temperature < low:
        raise ValueError(
            f"vLLM samples at temperature 0 (greedy) or {low} to {high}, got SamplingSpec.temperature="
            f"{sampling.temperature}"
        )


# ---------------------------------------------------------------- weights in 8 bits
#
# Written for vLLM 0.32, whose layerwise reload quantizes each layer again once its new weights have arrived. Those
# that need a checkpoint or calibration (AWQ, GPTQ, ...) cannot follow a policy and are refused.

_NAMES = {
    # One scale for each output channel and each token: close to the policy, and the one that vLLM's CPU build has.
    "fp8": "fp8_per_channel",
    "fp8_per_channel": "fp8_per_channel",
    "fp8_per_tensor": "fp8_per_tensor",
    "fp8_per_block": "fp8_per_block",
    "mxfp8": "mxfp8",
}
"""What we take, and vLLM's name of it."""


def check_quantization(quantization: str | None) -> None:
    """Raise ValueError for a quantization that vLLM does not apply to weights as they arrive."""
    if quantization is not None and quantization not in _NAMES:
        raise ValueError(
            f"VLLMPool(quantization=...) must be None or one of {', '.join(map(repr, _NAMES))}, which vLLM applies to "
            f"the weights of every sync, got {quantization!r}"
        )


def quantization_arguments(quantization: str | None, dtype: str | torch.dtype) -> dict[str, Any]:
    """Return arguments of ``vllm.EngineArgs``; ValueError if ``dtype``, in which engines compute, has 32 bits."""
    if quantization is None:
        return {}
    name = str(dtype).removeprefix("torch.")
    if name not in ("bfloat16", "float16"):
        raise ValueError(
            f"VLLMPool(quantization={quantization!r}) needs engines that compute in 16 bits, got {name}: set "
            "VLLMPool(dtype='bfloat16') or train in a precision like 'bf16-true'"
        )
    return {"quantization": _NAMES[quantization]}
