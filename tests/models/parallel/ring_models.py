"""Models whose attention is computed in a ring, beside each rank alone."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.parallel.sequence_ranks import LENGTHS, Batch, attach, gradients, language_model, policy_loss, scalar_loss
from models.parallel.sequence_ranks import scalar_model as scalar_model_of_qwen
from rlhfkit.mesh import ForwardGroup, Mesh
from rlhfkit.strategies.deepspeed import rendezvous


def odd_heads() -> nn.Module:
    """Three heads with one key head, which no even number of ranks can divide; windows; recomputed layers."""
    model = language_model(family="mistral", num_attention_heads=3, num_key_value_heads=1, sliding_window=6)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def two_heads() -> nn.Module:
    """Fewer heads than four ranks, recomputed in the backward pass."""
    model = language_model(num_attention_heads=2, num_key_value_heads=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Tensor, list[Tensor]]]]] = {
    "four heads": (language_model, policy_loss),
    "two heads, checkpointing": (two_heads, policy_loss),
    "three heads, window, reentrant checkpointing": (odd_heads, policy_loss),
    "scalar": (scalar_model_of_qwen, scalar_loss),
}


def all_reduced(model: nn.Module) -> dict[str, Tensor]:
    """Gradients summed over all ranks."""
    found = gradients(model)
    for gradient in found.values():
        dist.all_reduce(gradient)
    return found


def differences() -> dict[str, float]:
    """Largest difference of outputs and gradients of each case and size of a sequence group, among 4 ranks."""
    rank = dist.get_rank()
    batch = Batch(LENGTHS[rank], seed=rank)
    groups = {f"ring of {size}": ForwardGroup.create(Mesh(rank, 4, sequence=size), "ring") for size in (2, 4)}
    found: dict[str, float] = {}
    for case, (build, loss_of) in CASES.items():
        alone = build()
        loss, columns = loss_of(alone, batch)
        loss.backward()
        summed = all_reduced(alone)
        largest = max(float(gradient.abs().max()) for gradient in summed.values())
        for name, group in groups.items():
            together = copy.deepcopy(alone)
            together.zero_grad()
            attach(together, group)
            joint_loss, joint = loss_of(together, batch)
            joint_loss.backward()
            pairs = [(a.detach(), b.detach(), 1.0) for a, b in zip(columns, joint, strict=True) if a.numel()]
            joint_sum = all_reduced(together)
            pairs += [(gradient, joint_sum[key], max(largest, 1.0)) for key, gradient in summed.items()]
            found[f"{case}, {name}"] = max(float((a - b).abs().max()) / scale for a, b, scale in pairs)
    return found


def zero(stage: int) -> dict[str, float]:
    """Largest difference of gradients under DeepSpeed's ZeRO to those without, in float32, of one ring."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    rendezvous.prepare_cpu()  # or DeepSpeed compiles an extension, which takes a minute
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch, group = Batch(LENGTHS[rank], seed=rank), ForwardGroup.create(Mesh(rank, ranks, sequence=ranks), "ring")
    alone = odd_heads().float()
    together = copy.deepcopy(alone)
    policy_loss(alone, batch)[0].backward()
    mean = {name: gradient / ranks for name, gradient in all_reduced(alone).items()}
    attach(together, group)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=together, config=config, optimizer=optimizer)
    engine.backward(policy_loss(engine, batch)[0])
    found = {name: safe_get_full_grad(parameter) for name, parameter in together.named_parameters()}
    engine.destroy()
    largest = max(float(gradient.abs().max()) for gradient in mean.values())
    return {f"ZeRO {stage}": max(float((mean[name] - found[name]).abs().max()) / largest for name in mean)}
