"""Loss scales of fp16 engines: each engine has its own, which multiplies its loss and divides its gradients.

The optimizer wrappers of deepspeed 0.19.8 keep the scale in different places at stage 0 and from stage 1 on.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlhfkit.strategies.deepspeed.gradients import discard_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

LARGEST_HALF = 65504.0
"""The largest finite float16."""


def loss_scale(engine: "DeepSpeedEngine") -> float:
    """Return what the engine's losses are multiplied by; 1 unless it trains in fp16."""
    if not engine.fp16_enabled():
        return 1.0
    optimizer: Any = engine.optimizer
    return float(optimizer.loss_scaler.cur_scale if _has_zero(engine) else optimizer.loss_scale_config.cur_scale)


def scaled_for_autograd(engine: "DeepSpeedEngine", loss: Tensor) -> Tensor:
    """Multiply a loss as ``engine.backward`` would, for a backward pass that does not go through it."""
    return loss * loss_scale(engine) if engine.fp16_enabled() else loss


def scaled_for_engine(engine: "DeepSpeedEngine", loss: Tensor) -> Tensor:
    """Multiply a loss for ``engine.backward``, which at stage 0 does not, but divides the gradients nevertheless."""
    return loss if _has_zero(engine) else scaled_for_autograd(engine, loss)


def loss_scale_can_fall(engine: "DeepSpeedEngine") -> bool:
    """Whether the engine trains in fp16 with a dynamic loss scale above its minimum."""
    if not engine.fp16_enabled():
        return False
    if _has_zero(engine):
        scaler = engine.optimizer.loss_scaler
        return bool(scaler.dynamic and scaler.cur_scale > scaler.min_scale)
    scale = engine.optimizer.loss_scale_config
    return bool(scale.dynamic_loss_scale and scale.cur_scale > scale.min_loss_scale)


def lower_loss_scale(engine: "DeepSpeedEngine") -> None:
    """Drop the gradients of an engine and lower its dynamic loss scale, as DeepSpeed does after an overflow."""
    discard_gradients(engine)
    engine.optimizer._update_scale(True)
    engine.skipped_steps += 1


def step(engine: "DeepSpeedEngine") -> bool:
    """Step an engine; return whether it did not step because its sum of fp16 gradients overflowed.

    deepspeed 0.19.8 raises the loss scale, every ``loss_scale_window`` steps without an overflow, before it divides the
    gradients by it: that step's gradients would be half as large as they are. Here the scale changes after the step.
    """
    if not engine.fp16_enabled():
        engine.step()
        return False
    optimizer: Any = engine.optimizer
    update = optimizer._update_scale
    overflows: list[bool] = []
    optimizer._update_scale = overflows.append
    try:
        engine.step()
    finally:
        del optimizer._update_scale
    if hasattr(optimizer, "fp32_groups") and not any(overflows):  # stage 0; the others report it unscaled
        engine._global_grad_norm /= loss_scale(engine)
    for overflow in overflows:
        update(overflow)
    return any(overflows)


def _has_zero(engine: "DeepSpeedEngine") -> bool:
    return bool(engine.zero_optimization())
