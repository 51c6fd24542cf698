"""``OptimizationMixin``: AdamW, learning-rate schedules (warm-up, then constant, linear or cosine), and clipping."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, MixedPrecision
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from rlhfkit.validation import check_number

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int | None) -> float:
    """Factor in [0, 1] of the peak learning rate after ``step`` optimizer steps, as in Transformers' schedules.

    It rises linearly from 0 to 1 during warm-up, then stays 1 (``constant``; ``total_steps`` may be ``None``), or falls
    to 0 at the end of the run along a line (``linear``) or half a cosine (``cosine``: Loshchilov and Hutter, 2017,
    arXiv:1608.03983, without restarts).
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    done = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def make_adamw(
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    trainer: L.Trainer | None,
) -> torch.optim.AdamW:
    """Make torch's AdamW over parameter groups, with its fused kernels where a Trainer trains on GPUs.

    They need no temporaries of the size of the parameters, which cost 4 bytes a parameter otherwise, and serve states
    that DeepSpeed has offloaded to the CPU too: there a step took 0.07 of the time of torch's default on two cores, and
    0.75 of that of DeepSpeedCPUAdam, which needs a compiler and rounds differently after a resume. On CPUs the default
    stays, and its numbers; so it does where Lightning's gradient scaler clips (``16-mixed``), which refuses fused ones.
    """
    if trainer is None or trainer.strategy.root_device.type != "cuda":
        fused, why = False, "no Trainer" if trainer is None else "not on a GPU"
    elif isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler is not None:
        fused, why = False, "Lightning's gradient scaler cannot clip the gradients of fused optimizers"
    else:
        fused, why = True, "on a GPU"
    rank_zero_info(f"AdamW: {'fused' if fused else 'default'} kernels of torch, {why}")
    # None, not False: False also switches torch's own choice of kernels for lists of tensors off.
    return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=weight_decay, fused=fused or None)


class OptimizationMixin(L.LightningModule):
    """The part of a module that makes its optimizer and clips its gradients."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    lr_schedule: Schedule

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: one for each child with parameters that require a gradient.

        Add ``"lr"`` to a group to give it its own learning rate.
        """
        groups = {
            name: [parameter for parameter in child.parameters() if parameter.requires_grad]
            for name, child in self.named_children()
        }
        return [{"params": parameters, "name": name} for name, parameters in groups.items() if parameters]

    def configure_optimizers(self) -> Any:
        """AdamW over :meth:`parameter_groups`, with warm-up and decay per optimizer step."""
        if self._trainer is not None:  # Lightning accepts NaN, which would make every gradient NaN
            clip = self.trainer.gradient_clip_val
            check_number("Trainer(gradient_clip_val=...)", clip, minimum=0, optional=True, infinite=True)
        groups = self.parameter_groups()
        optimizer = make_adamw(
            groups, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, trainer=self._trainer
        )
        kind, warmup = self.lr_schedule, self.warmup_steps
        if kind == "constant" and not warmup:
            return optimizer
        total: int | None = None
        if kind != "constant":
            steps = self.trainer.estimated_stepping_batches
            if steps == math.inf:
                raise ValueError(f"lr_schedule={kind!r} decays to the end of training: give Trainer(max_epochs=...)")
            total = int(steps)
        factor = partial(learning_rate_factor, schedule=kind, warmup_steps=warmup, total_steps=total)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

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
