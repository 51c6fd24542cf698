"""Lightning's precision plugin for DeepSpeed engines, which cast parameters themselves; and loss scales of fp16."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from rlhfkit.strategies.deepspeed.gradients import discard_gradients

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class EnginePrecision(DeepSpeedPrecision):
    """Leaves dtypes to the engines and passes the Trainer's clipping to them.

    Lightning's plugin casts all floating tensors of a batch to the training dtype, which would round old log-probs,
    advantages and returns to bf16. It also casts buffers; DeepSpeed casts parameters only.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"bf16-mixed"``, ``"16-true"`` or ``"16-mixed"``. ``true`` and
            ``mixed`` mean the same here: 16-bit parameters with fp32 main weights in the optimizer.
        set_clipping: Called with an optimizer and the maximum norm (0: no clipping) before its engines step.
    """

    def __init__(self, precision: Any, set_clipping: Callable[[Optimizer, float], None]) -> None:
        super().__init__(precision)
        self._set_clipping = set_clipping

    def convert_input(self, data: Any) -> Any:
        """Return the batch unchanged."""
        return data

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module unchanged: DeepSpeed casts parameters when engines are created."""
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Do nothing: modules are built in their own dtypes."""
        return nullcontext()

    def clip_gradients(
        self,
        optimizer: Optimizer | Optimizable,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType | None = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip each engine of ``optimizer`` to the norm ``clip_val`` in its next step."""
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            raise MisconfigurationException(
                "DeepSpeed clips gradients by norm only; use Trainer(gradient_clip_algorithm='norm')."
            )
        # Lightning types the argument wider, for Fabric; a Trainer always passes an optimizer.
        self._set_clipping(optimizer, float(clip_val or 0.0))  # type: ignore[arg-type]


# ---------------------------------------------------------------- loss scale
#
# Loss scales of fp16 engines: each engine has its own, which multiplies its loss and divides its gradients.
#
# The optimizer wrappers of deepspeed 0.19.8 keep the scale in different places at stage 0 and from stage 1 on.


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
