"""Precision under DeepSpeed engines: the engines cast, inputs stay as they are, clipping is per engine."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer


class EnginePrecision(DeepSpeedPrecision):
    """Leaves dtypes to the engines and hands the Trainer's clipping to them.

    Lightning's plugin casts every floating tensor of a batch to the training dtype; old log-probabilities, advantages
    and returns would be rounded to bf16. It also casts buffers. DeepSpeed casts parameters only.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"bf16-mixed"``, ``"16-true"`` or ``"16-mixed"``. The two spellings
            of a 16-bit precision mean the same here: 16-bit parameters with fp32 main weights in the optimizer.
        set_clipping: Called with an optimizer and the maximum norm (0 for none) before its engines step.
    """

    def __init__(self, precision: Any, set_clipping: Callable[[Optimizer, float], None]) -> None:
        super().__init__(precision)
        self._set_clipping = set_clipping

    def convert_input(self, data: Any) -> Any:
        """Batches keep their dtypes."""
        return data

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Parameters are cast when the engines are made."""
        return module

    def tensor_init_context(self) -> AbstractContextManager:
        """Modules are built in their own dtypes."""
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager:
        """Modules are built in their own dtypes."""
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
        # Lightning types the argument wider, for Fabric; a Trainer always hands over an optimizer.
        self._set_clipping(optimizer, float(clip_val or 0.0))  # type: ignore[arg-type]
