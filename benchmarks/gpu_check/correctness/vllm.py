"""vLLM engines on Ray: iterations whose probes compare log-probs after each sync; needs both packages."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.models import tiny_model

PACKAGES = ("vllm", "ray")


def iterate(setting: Setting, *, lora_module: bool = False, **pool_arguments: Any) -> Iterator[Figure]:
    """Two iterations of GRPO: an engine that was sent wrong weights fails the probe, which raises."""
    import ray

    from benchmarks.gpu_check.runs import FirstWeights, Prompts, digits, trainer, weights_of
    from rlhfkit import GRPOModule, LoRA, RolloutCallback, SamplingSpec, VLLMPool

    place = {} if setting.on_gpu else {"device": "cpu", "kv_cache_gib": 1 / 16}
    pool = VLLMPool(
        max_model_len=256, start_timeout=150, generate_timeout=60, sync_timeout=30, **place | pool_arguments
    )
    keep = FirstWeights()
    rollouts = RolloutCallback(digits, engine=pool, sampling=SamplingSpec(group_size=4, max_new_tokens=8))
    precision = "bf16-true" if setting.on_gpu else "32-true"
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_model(Path(name))
        module = GRPOModule(str(folder), lr=1e-3, lora=LoRA(rank=8) if lora_module else None)
        options = {"max_epochs": 2, "accumulate_grad_batches": 2, "precision": precision}
        run = trainer(setting, folder, callbacks=[rollouts, keep], **options)
        try:
            run.fit(module, Prompts())
        finally:
            pool.close()
            ray.shutdown()  # the process ends without what libraries do at exit
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    moved = float((weights_of(module) - keep.weights).norm())
    yield Figure("the weights never moved", float(not moved > 0), 0)
    # Of sampled tokens; the probe after each sync has its own bounds.
    mean, bound = metrics["rollout_corr/logprob_abs_diff_mean"], 0.3 if "quantization" in pool_arguments else 0.05
    yield Figure("log-probs of engine and trainer, mean difference", mean, bound, "nats")
    for key in sorted(metrics):
        if key.startswith(("time/", "memory/", "rollout/sync")):
            yield Figure(key, metrics[key])


@check("vllm/colocated_sleep_2", seconds=240, packages=PACKAGES, gpus=1, process="vllm")
def colocated(setting: Setting) -> Iterator[Figure]:
    """An engine on the rank's GPU, whose weights and cache leave it while the policy learns."""
    yield from iterate(setting, colocate=True, sleep_level=2, gpu_memory_utilization=0.3)


@check("vllm/colocated_sleep_1", seconds=240, packages=PACKAGES, gpus=1, process="vllm 1")
def colocated_keeping(setting: Setting) -> Iterator[Figure]:
    """The same with weights kept in main memory."""
    yield from iterate(setting, colocate=True, sleep_level=1, gpu_memory_utilization=0.3)


@check("vllm/nccl", seconds=240, packages=PACKAGES, gpus=2, process="vllm nccl")
def nccl(setting: Setting) -> Iterator[Figure]:
    """An engine on a GPU of its own, weights over NCCL."""
    yield from iterate(setting, transfer="nccl")


@check("vllm/gloo", seconds=240, packages=PACKAGES, gpus=2, process="vllm gloo")
def gloo(setting: Setting) -> Iterator[Figure]:
    """An engine on a GPU of its own, weights through main memory."""
    yield from iterate(setting, transfer="gloo")


@check("vllm/adapter", seconds=240, packages=(*PACKAGES, "peft"), gpus=2, process="vllm adapter")
def adapter(setting: Setting) -> Iterator[Figure]:
    """A LoRA adapter that the engine applies itself."""
    yield from iterate(setting, lora_module=True, lora="adapter")


@check("vllm/fp8", seconds=240, packages=PACKAGES, gpus=2, process="vllm fp8")
def fp8(setting: Setting) -> Iterator[Figure]:
    """An engine in 8 bits, quantized again at every sync."""
    yield from iterate(setting, quantization="fp8")
