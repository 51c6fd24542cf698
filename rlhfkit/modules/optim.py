"""``Optimization``: optimizer and learning-rate schedule; ``OptimizationMixin`` makes both, and clips gradients."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, Self, get_args

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from rlhfkit.argument_names import AnswersNames
from rlhfkit.mesh import mesh_of
from rlhfkit.modules.optimizers import muon
from rlhfkit.modules.optimizers.factories import (
    FLAT_PARAMETERS,
    WHOLE_PARAMETERS,
    OptimizerFactory,
    check_optimizer_arguments,
    make_optimizer,
    taken_names,
)
from rlhfkit.modules.optimizers.groups import check_parameter_options, divide_groups
from rlhfkit.protocols import RLHFStrategy
from rlhfkit.validation import (
    check_integer,
    check_number,
    function_name,
    options,
    refuse_without_effect,
    resolve_function,
)

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
ENDLESS: tuple[str, ...] = ("constant", "inverse_sqrt")
"""Schedules that do not depend on the length of the run."""

DEFAULT_BETAS = (0.9, 0.95)
"""Averaging factors of AdamW if none are given."""


@dataclass(frozen=True)
class Optimization(metaclass=AnswersNames):
    """Optimizer of a module and schedule of its learning rate, beside the peak rate ``lr``.

    Example::

        GRPOModule("Qwen/Qwen3-0.6B", lr=1e-6, optimization=Optimization(warmup_ratio=0.03, lr_schedule="cosine"))

    Args:
        warmup_steps: Optimizer steps of linear warm-up.
        warmup_ratio: Warm-up as a part of the run's optimizer steps, instead of ``warmup_steps``.
        lr_schedule: After warm-up: ``constant``; ``linear`` or ``cosine`` decay to the end of training; ``wsd``:
            constant, then decay in the last part; ``inverse_sqrt``: as 1 / sqrt(step). The formulas are those of
            :func:`~rlhfkit.modules.optim.learning_rate_factor`.
        min_lr_ratio: The rate at the end, as a part of the peak; not with ``constant``.
        decay_ratio: The part of the run in which ``wsd`` decays, only with it (0.2: Hägele et al., 2024,
            arXiv:2405.18392).
        weight_decay: Decoupled weight decay; ``sgd`` adds it to the gradient.
        betas: AdamW's two averaging factors (0.9 and 0.95: OpenRLHF's default).
        optimizer: ``adamw``, ``adamw_8bit``, ``muon``, ``sgd``, ``adafactor`` (:mod:`rlhfkit.modules.optimizers`), or a
            function of parameter groups and ``lr`` or a class of optimizers, itself or by its dotted name
            (``torch.optim.RAdam``).
        optimizer_arguments: More arguments of ``optimizer``, for example ``{"eps": 1e-6}``.
        parameter_options: ``lr`` and ``weight_decay`` of parts: ``embeddings``, ``heads``, ``matrices``, ``vectors``,
            ``stacks`` (of experts), a child (``critic``) or both (``critic.heads``), which wins.

    Raises:
        TypeError: If a value is of another type.
        ValueError: If a value is out of range, or has no effect beside the others.
    """

    warmup_steps: int = 0
    warmup_ratio: float | None = None
    lr_schedule: Schedule = "constant"
    min_lr_ratio: float = 0.0
    decay_ratio: float = 0.2
    weight_decay: float = 0.0
    betas: tuple[float, float] = DEFAULT_BETAS
    optimizer: str | OptimizerFactory = "adamw"
    optimizer_arguments: Mapping[str, Any] | None = None
    parameter_options: Mapping[str, Mapping[str, float]] | None = None

    def __post_init__(self) -> None:
        schedule = self.lr_schedule
        check_number("weight_decay", self.weight_decay, minimum=0)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise TypeError(f"betas must be two numbers, got {self.betas!r}")
        for factor in self.betas:
            check_number("each of betas", factor, minimum=0, below=1)
        check_integer("warmup_steps", self.warmup_steps, minimum=0)
        check_number("warmup_ratio", self.warmup_ratio, minimum=0, maximum=1, optional=True)
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(f"give warmup_steps={self.warmup_steps} or warmup_ratio={self.warmup_ratio}, not both")
        if schedule not in SCHEDULES:
            raise ValueError(f"lr_schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        check_number("min_lr_ratio", self.min_lr_ratio, minimum=0, maximum=1, why="it is a part of lr")
        check_number("decay_ratio", self.decay_ratio, above=0, maximum=1, why="it is a part of the run")
        unused = {"min_lr_ratio": self.min_lr_ratio != 0.0 and schedule == "constant"}
        unused |= {"decay_ratio": self.decay_ratio != 0.2 and schedule != "wsd"}
        refuse_without_effect(unused, f"lr_schedule={schedule!r}")
        # Lists and null of configuration files.
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "optimizer_arguments", dict(self.optimizer_arguments or {}))
        object.__setattr__(self, "parameter_options", check_parameter_options(self.parameter_options))
        check_optimizer_arguments(self.function, self.name, self.optimizer_arguments or {})
        chosen = {"betas": self.betas, "weight_decay": self.weight_decay}
        for name, value in chosen.items():
            if value not in (DEFAULT_BETAS, 0.0) and name not in taken_names(self.function):
                rank_zero_warn(f"{name}={value} is not used: optimizer={self.name!r} takes no {name}")

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | None) -> Self:
        """Return the options that were given: themselves, their fields by name, or ``None`` for the defaults.

        Raises:
            ValueError: If the mapping has other names.
        """
        return options(cls, value)

    def plain(self) -> dict[str, Any]:
        """Dictionary of plain values, for checkpoints and logs."""
        return asdict(self) | {"optimizer": self.name, "betas": list(self.betas)}

    @property
    def function(self) -> OptimizerFactory:
        """What makes the optimizer."""
        return resolve_function(self.optimizer, "optimizer", home="rlhfkit.modules.optimizers")

    @property
    def name(self) -> str:
        """Name of the optimizer, dotted if it is none of ours."""
        return self.optimizer if isinstance(self.optimizer, str) else function_name(self.optimizer)


def learning_rate_factor(
    step: int,
    *,
    schedule: str,
    warmup_steps: int,
    total_steps: int | None,
    minimum: float = 0.0,
    decay_steps: int | None = None,
) -> float:
    """Factor in [0, 1] of the peak learning rate after ``step`` optimizer steps.

    It rises linearly from 0 to 1 during warm-up. Then, with ``x`` from 0 to 1 through the rest of the run, it is

    - ``constant``: 1;
    - ``linear``: ``1 - x``;
    - ``cosine``: ``(1 + cos πx) / 2`` (Loshchilov and Hutter, 2017, arXiv:1608.03983, without restarts);
    - ``inverse_sqrt``: ``1 / sqrt(step / warmup_steps)`` (Vaswani et al., 2017, arXiv:1706.03762);
    - ``wsd`` (warm-up, stable, decay: Hu et al., 2024, arXiv:2404.06395): 1 until the last ``decay_steps``, in which it
      is ``1 - sqrt(x)`` of them (Hägele et al., 2024, arXiv:2405.18392).

    A factor ``f`` after warm-up becomes ``minimum + (1 - minimum) f``.

    Args:
        step: Optimizer steps so far.
        schedule: Shape, see above.
        warmup_steps: Optimizer steps of warm-up; ``inverse_sqrt`` takes 10,000 for 0, as in Transformers.
        total_steps: Optimizer steps of the run; ``None`` for schedules that do not depend on it.
        minimum: Factor at the end, in [0, 1].
        decay_steps: Optimizer steps of ``wsd``'s decay.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "inverse_sqrt":
        timescale = warmup_steps or 10_000
        factor = 1.0 / math.sqrt((step + timescale - warmup_steps) / timescale)
    elif schedule == "constant" or total_steps is None:
        factor = 1.0
    elif schedule == "wsd":
        length = max(decay_steps or 1, 1)
        factor = 1.0 - math.sqrt(min(max(step - (total_steps - length), 0) / length, 1.0))
    else:
        done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
        factor = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return minimum + (1.0 - minimum) * factor if minimum else factor


def skip_update(module: L.LightningModule, child: str) -> None:
    """Leave a child of a module unchanged in the coming update; call it in ``on_before_optimizer_step``.

    Its gradients are dropped. Weights and optimizer state stay bitwise the same (no weight decay, no momentum);
    learning-rate schedules and ``global_step`` advance.
    """
    strategy = module.trainer.strategy
    if isinstance(strategy, RLHFStrategy):
        strategy.skip_update(child)  # the gradients are in its engine
        return
    for parameter in module.get_submodule(child).parameters():
        parameter.grad = None  # an optimizer ignores parameters without a gradient


class OptimizationMixin(L.LightningModule):
    """The part of a module that makes its optimizer and clips its gradients."""

    lr: float
    optimization: Optimization

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: one for each child with parameters that require a gradient.

        Add ``"lr"`` to a group to give it its own learning rate; ``parameter_options`` then divide the groups further.
        """
        groups = {
            name: [parameter for parameter in child.parameters() if parameter.requires_grad]
            for name, child in self.named_children()
        }
        return [{"params": parameters, "name": name} for name, parameters in groups.items() if parameters]

    def configure_optimizers(self) -> Any:
        """The optimizer over :meth:`parameter_groups`, with warm-up and decay per optimizer step.

        Raises:
            ValueError: If the strategy divides parameters that the optimizer needs whole, or a schedule needs the
                length of a run that is endless.
        """
        if self._trainer is not None:  # Lightning accepts NaN, which would make every gradient NaN
            clip = self.trainer.gradient_clip_val
            check_number("Trainer(gradient_clip_val=...)", clip, minimum=0, optional=True, infinite=True)
        chosen, options = self.optimization, self.optimization.parameter_options
        function = chosen.function
        if function in WHOLE_PARAMETERS:
            self._require_whole_parameters()
        groups = self.parameter_groups()
        if options or function is muon:
            groups = divide_groups(self, groups, options or {}, by_kind=function is muon)
        optimizer = make_optimizer(
            function,
            groups,
            chosen.optimizer_arguments or {},
            lr=self.lr,
            betas=chosen.betas,
            weight_decay=chosen.weight_decay,
            trainer=self._trainer,
        )
        if chosen.lr_schedule == "constant" and not chosen.warmup_steps and not chosen.warmup_ratio:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _learning_rate_factor(self) -> partial[float]:
        """The schedule, a function of the number of optimizer steps."""
        chosen, total = self.optimization, None
        kind, warmup = chosen.lr_schedule, chosen.warmup_steps
        if kind not in ENDLESS or chosen.warmup_ratio:
            steps = self.trainer.estimated_stepping_batches
            if steps == math.inf:
                why = (
                    f"lr_schedule={kind!r} decays to" if kind not in ENDLESS else "warmup_ratio is a part of the way to"
                )
                raise ValueError(f"{why} the end of training: give Trainer(max_epochs=...)")
            total = int(steps)
        if chosen.warmup_ratio and total is not None:
            warmup = math.ceil(chosen.warmup_ratio * total)
        return partial(
            learning_rate_factor,
            schedule=kind,
            warmup_steps=warmup,
            total_steps=total,
            minimum=chosen.min_lr_ratio,
            decay_steps=None if total is None else math.ceil(chosen.decay_ratio * total),
        )

    def _require_whole_parameters(self) -> None:
        """Raise ValueError if the strategy gives the optimizer parts of parameters."""
        if self._trainer is None:
            return
        strategy: Any = self.trainer.strategy
        where = None
        if isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
            where = f"{type(strategy).__name__} divides them"
        elif mesh_of(self.trainer).tensor > 1:
            where = "tensor_parallel_size divides them"
        elif isinstance(strategy, RLHFStrategy):
            where = self._divided_by_engines(strategy)
        elif isinstance(strategy, DeepSpeedStrategy):
            where = f"{type(strategy).__name__} does not say how DeepSpeed divides them"
        if where is not None:
            raise ValueError(
                f"optimizer={self.optimization.name!r} computes with whole parameters, and {where}: it would learn "
                "something else. Train with RLHFDeepSpeedStrategy, or Trainer(strategy='ddp'), or take "
                "optimizer='adamw', 'adamw_8bit' or 'sgd'"
            )

    def _divided_by_engines(self, strategy: RLHFStrategy) -> str | None:
        """Why the optimizer cannot compute under ``RLHFDeepSpeedStrategy``; ``None``: it can."""
        for name, child in self.named_children():
            if not any(parameter.requires_grad for parameter in child.parameters()):
                continue
            zero = strategy.config_of(name, trainable=True)["zero_optimization"]
            if not zero.get("stage", 0):
                continue
            if self.optimization.function not in FLAT_PARAMETERS:
                return "ZeRO flattens and divides them from stage 1 on, of which optimizer='muon' alone knows"
            if (zero.get("offload_optimizer") or {}).get("device") == "nvme":
                return "DeepSpeed's NVMe offload leaves only parts of its states in memory"
        return None

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradient of each child by its own norm, and log the norms as ``grad_norm/<child>``.

        A large gradient of a critic then does not shrink the actor's update. DeepSpeed's engines do this themselves.
        Without a ``gradient_clip_val`` nothing is clipped or logged.
        """
        if not gradient_clip_val or isinstance(self.trainer.precision_plugin, DeepSpeedPrecision):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        owners = {id(parameter): name for name, child in self.named_children() for parameter in child.parameters()}
        by_child: dict[str, list[nn.Parameter]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                by_child.setdefault(owners.get(id(parameter), "module"), []).append(parameter)
        for name, parameters in by_child.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self.log(f"grad_norm/{name}", torch.nn.utils.get_total_norm(gradients))
            # The precision plugin reads the parameters from the optimizer, and whether it unscales gradients itself.
            unscales = getattr(optimizer, "_step_supports_amp_scaling", False)
            part: Any = SimpleNamespace(param_groups=[{"params": parameters}], _step_supports_amp_scaling=unscales)
            self.clip_gradients(part, gradient_clip_val, gradient_clip_algorithm)
