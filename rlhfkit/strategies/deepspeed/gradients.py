"""Clip, measure and discard the gradients of a DeepSpeed engine.

The optimizer wrappers of deepspeed 0.19.8 have no common interface and are distinguished by their attributes.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlhfkit.distributed import tensor_part

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def undo_initial_step(engine: "DeepSpeedEngine") -> None:
    """Undo the optimizer step with zero gradients that DeepSpeed takes when it creates a 16-bit engine at stage 0.

    deepspeed 0.19.8 does it to allocate optimizer state (fp16/fused_optimizer.py and unfused_optimizer.py,
    initialize_optimizer_states). It shifts Adam's bias correction by one step and applies weight decay once.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp16_groups_flat"):  # fused
        pairs = list(zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True))
    elif hasattr(optimizer, "fp32_groups"):  # unfused
        groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        pairs = [pair for fp32, fp16 in groups for pair in zip(fp32, fp16, strict=True)]
    else:
        return
    engine.basic_optimizer.state.clear()
    for fp32, fp16 in pairs:
        fp32.data.copy_(fp16.data)


def set_clipping(engine: "DeepSpeedEngine", norm: float) -> None:
    """Clip the gradient of the engine to ``norm`` in its next steps; 0: do not clip."""
    if hasattr(engine.optimizer, "clip_grad"):  # ZeRO 1 to 3 and the 16-bit optimizers
        engine.optimizer.clip_grad = norm
        return
    # fp32 at stage 0: the engine clips the averaged gradients itself and does not report their norm.
    engine._config.gradient_clipping = math.inf
    engine.clip_fp32_gradients = lambda: _clip_and_measure(engine, norm)


def _clip_and_measure(engine: "DeepSpeedEngine", norm: float) -> None:
    """Clip plain fp32 gradients, which are already averaged over ranks, and store their norm."""
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    total = _norm_of_whole_gradients(parameters)
    engine._global_grad_norm = total.item()
    if norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, norm, total)


def _norm_of_whole_gradients(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """The norm of all gradients; of those that tensor parallelism divides, over all parts. Then a collective."""
    whole = [p.grad for p in parameters if p.grad is not None and tensor_part(p) is None]
    parts = [(p.grad, part) for p in parameters if p.grad is not None and (part := tensor_part(p)) is not None]
    total = torch.nn.utils.get_total_norm(whole)
    if not parts:
        return total
    square = torch.nn.utils.get_total_norm([gradient for gradient, _ in parts]).square()
    dist.all_reduce(square, group=parts[0][1].group)
    return (square + total.square()).sqrt()


def gradient_norm(engine: "DeepSpeedEngine") -> float:
    """Return the norm of the last step's gradient before clipping; NaN if DeepSpeed does not know it."""
    norm: Any = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm)


def discard_gradients(engine: "DeepSpeedEngine") -> None:
    """Drop all accumulated gradients, also those already reduced by ZeRO, which ``zero_grad`` keeps.

    Clears the buffers that deepspeed 0.19.8 clears after an overflow.
    """
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        parameter.grad = None
    optimizer.zero_grad(set_to_none=True)
    if hasattr(optimizer, "_overflow_clean_up"):  # ZeRO 3
        optimizer._overflow_clean_up(optimizer.loss_scale)
        optimizer.micro_step_id = 0
    elif hasattr(optimizer, "averaged_gradients"):  # ZeRO 1 and 2
        optimizer._release_preflattened_grad_buffers()
        optimizer.micro_step_id = -1  # otherwise offloading adds the next gradient to the dropped one
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
        # Before the first step, only all_grad_tensors has gradients.
        for held in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            for group in held:
                held[group] = None
    elif hasattr(optimizer, "clear_hp_grads"):  # bf16 at ZeRO 1
        optimizer.clear_hp_grads()
        optimizer.clear_lp_grads()
