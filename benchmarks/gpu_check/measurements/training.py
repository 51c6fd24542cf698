"""A step of training with random weights: tokens per second, memory, waits of the host, and the optimizer."""

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_check.check import Figure, Setting, SkippedError, check
from benchmarks.gpu_check.compare import seconds_of
from benchmarks.gpu_check.measurements.attention import ragged
from benchmarks.gpu_check.models import Rows, build, large_config, random_sequences


def batch(setting: Setting, tokens: int, vocabulary: int) -> Rows:
    """Ragged sequences of so many tokens in all."""
    return Rows(random_sequences(ragged(tokens), vocabulary=vocabulary), setting.device)


def policy_step(model: nn.Module, optimizer: torch.optim.Optimizer | None, rows: Rows) -> Callable[[], None]:
    """Forward, backward and the optimizer's step of a policy loss."""
    from rlhfkit.losses import ppo_loss
    from rlhfkit.models import policy_output

    advantages = torch.linspace(-1, 1, len(rows.input_ids), device=rows.input_ids.device)

    def step() -> None:
        out = policy_output(model, rows, rows.mask)
        ppo_loss(out.logprobs, out.logprobs.detach(), advantages, rows.mask).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=optimizer is not None)

    return step


def throughput(setting: Setting, size: str, tokens: int, *, checkpointing: bool) -> Iterator[Figure]:
    """Tokens per second and memory, bfloat16 throughout, AdamW with fused kernels."""
    model: Any = build(large_config(size), setting.device, torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=setting.device != "sim")
    rows = batch(setting, tokens, model.config.vocab_size)
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    step = policy_step(model, optimizer, rows)
    start = time.perf_counter()
    step()
    setting.synchronize()
    yield Figure(f"{size}: first step", time.perf_counter() - start, unit="s")
    seconds = seconds_of(step, setting, repeats=setting.size(3, 1))
    yield Figure(f"{size}: step of {tokens} tokens", seconds, unit="s")
    yield Figure(f"{size}: rate", tokens / seconds, unit="tokens/s")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # 6 operations per parameter and token, 8 when activations are computed again; attention is not counted.
    rate = (8 if checkpointing else 6) * parameters * tokens / seconds
    yield Figure(f"{size}: arithmetic", rate / 1e12, unit="TFLOP/s")
    if setting.on_gpu:
        yield Figure(f"{size}: peak memory", torch.cuda.max_memory_allocated() / 2**30, unit="GiB")


@check("measure/step_0.5B", seconds=60)
def half_a_billion(setting: Setting) -> Iterator[Figure]:
    """Qwen2.5 0.5B."""
    yield from throughput(setting, setting.size("0.5B", "tiny"), setting.size(16384, 200), checkpointing=False)


@check("measure/step_7B", seconds=90)
def seven_billion(setting: Setting) -> Iterator[Figure]:
    """Qwen2.5 7B with gradient checkpointing: 8 bytes a parameter, and activations of 8k tokens."""
    if setting.on_gpu and torch.cuda.mem_get_info()[0] < 72 * 2**30:
        raise SkippedError(f"needs 72 GiB of free memory, here are {torch.cuda.mem_get_info()[0] / 2**30:.0f}")
    if not setting.on_gpu and not setting.quick:
        raise SkippedError("needs a GPU, or --quick")
    yield from throughput(setting, setting.size("7B", "tiny"), setting.size(8192, 200), checkpointing=True)


@check("measure/optimizer", seconds=60)
def optimizer(setting: Setting) -> Iterator[Figure]:
    """AdamW's step for 0.5B parameters in bfloat16: fused and foreach."""
    model = build(large_config(setting.size("0.5B", "tiny")), setting.device, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    for name, options in {"fused": {"fused": True}, "foreach": {"foreach": True}}.items():
        if setting.device == "sim" and name == "fused":
            continue
        made = torch.optim.AdamW(model.parameters(), lr=1e-6, **options)  # type: ignore[arg-type]
        made.step()
        before = torch.cuda.memory_allocated() if setting.on_gpu else 0
        if setting.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        yield Figure(f"{name}: step", seconds_of(made.step, setting) * 1e3, unit="ms")
        if setting.on_gpu:
            extra = torch.cuda.max_memory_allocated() - before
            yield Figure(f"{name}: memory of a step beside states", extra / 2**30, unit="GiB")
        del made


@check("measure/host_waits", seconds=60)
def host_waits(setting: Setting) -> Iterator[Figure]:
    """Places where the host waits for the GPU in a step: forward, loss, backward and optimizer."""
    model = build(large_config("tiny"), setting.device, torch.bfloat16)
    fused = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=setting.device != "sim")
    step = policy_step(model, fused, batch(setting, 200, 512))
    step()
    if not setting.on_gpu:
        yield Figure("waits of a step", "only CUDA tells; tests/simulated_device counts them on a CPU")
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [one for one in caught if "synchroniz" in str(one.message)]
    yield Figure("waits of a step", len(waits))
    places = Counter(f"{re.sub(r'.*/(rlhfkit|site-packages)/', '', one.filename)}:{one.lineno}" for one in waits)
    for place, count in places.most_common():
        yield Figure(place, count)
