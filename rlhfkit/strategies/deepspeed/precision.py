"""Lightning's precision plugin for DeepSpeed engines: engines cast parameters, batches stay as they are."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.optim import Optimizer


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

    def module_init_context(self) -> AbstractContextManager[Any]:
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
