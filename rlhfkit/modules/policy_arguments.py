"""``PolicyArguments``: what all modules take beside their own arguments, for editors and type checkers.

A module writes ``**kwargs: Unpack[PolicyArguments]`` and hands them to :class:`~rlhfkit.modules.PolicyModule`, which
describes and checks them and has the defaults; command lines and ``help()`` read them there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.optimizers.factories import OptimizerFactory
from rlhfkit.modules.optimizers.schedules import Schedule
from rlhfkit.parts import GivenPart


class PolicyArguments(TypedDict, total=False):
    """Optimizer, loading of the model, and parts; all may be left out. :class:`PolicyModule` describes them."""

    weight_decay: float
    betas: tuple[float, float]
    optimizer: str | OptimizerFactory
    optimizer_arguments: Mapping[str, Any] | None
    parameter_options: Mapping[str, Mapping[str, float]] | None
    warmup_steps: int
    warmup_ratio: float | None
    lr_schedule: Schedule
    min_lr_ratio: float
    decay_ratio: float
    gradient_checkpointing: bool
    lora: LoRA | None
    loading: ModelLoading | None
    router_aux_loss_coef: float
    parts: Sequence[GivenPart]
