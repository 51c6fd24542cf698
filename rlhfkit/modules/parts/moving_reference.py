"""``MovingReference``: a reference model that follows the policy every so many optimizer steps (TR-DPO)."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from rlhfkit.distributed import broadcast, full_parameters, get_rank, is_sharded, tensor_part
from rlhfkit.models.forward import unwrap
from rlhfkit.models.lora import has_adapter
from rlhfkit.parts import Part, model_elsewhere
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rlhfkit.validation import check_integer, check_number

HALF = (torch.float16, torch.bfloat16)


class MovingReference(Part):
    """Moves the reference model of the module towards the policy (TR-DPO: Gorbatovski et al., arXiv:2404.09656).

    Example::

        DPOModule("sft", parts=[MovingReference(512)])
        GRPOModule("sft", kl_coef=0.01, parts=[MovingReference(64, alpha=1.0)])

    Args:
        steps: Move it every so many optimizer steps, the paper's τ (512 in TRL).
        alpha: α of that move, ``ref ← α policy + (1 - α) ref``; 0.6 as in the paper and TRL. 1 is the paper's hard
            update; a small α every step is an exponential moving average. Of a reference in 16 bits a float32 copy is
            kept, in which it moves: small steps would round away.

    Raises:
        ValueError: If an argument is out of range; when the module is made, if it has no reference model, or one
            elsewhere; when training starts, if the reference is the policy without its adapters.
    """

    def __init__(self, steps: int = 512, *, alpha: float = 0.6) -> None:
        check_integer("MovingReference.steps", steps, minimum=1)
        check_number("MovingReference.alpha", alpha, minimum=0, maximum=1)
        self.steps = steps
        self.alpha = alpha
        self.precise: dict[str, Tensor] = {}
        """Weights of 16 bits of the reference in float32, see :func:`mix_into`."""
        self._seen = 0
        """Optimizer steps after the last micro-batch."""

    def attach(self, module: Any) -> None:
        """Become a part of a module with a reference."""
        super().attach(module)
        elsewhere = model_elsewhere(module.parts, "reference")
        if elsewhere is not None:
            raise ValueError(
                f"MovingReference moves a reference of the module, and here a {type(elsewhere).__name__} has it: leave "
                "Reference(...) or MovingReference out, or go on from an export (HFExport) as the new reference"
            )
        if not module.has_reference:
            raise ValueError(
                "MovingReference moves a reference model that nothing asks: give a kl_coef (0.01 is OpenRLHF's), leave "
                "precompute_ref_log_probs and reference_free out, or leave MovingReference out"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Check that there is a copy of the policy that can move."""
        if has_adapter(pl_module.policy) or not hasattr(pl_module, "reference"):
            raise ValueError(
                "MovingReference moves a full copy of the policy, and here there is none (adapters are trained, and "
                "the policy without them is the reference): leave it out"
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Remember where training starts: what a checkpoint has moved is not moved again."""
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        """Move the reference after every ``steps`` optimizer steps."""
        self._follow(trainer.global_step)

    def _follow(self, step: int) -> None:
        """Move the reference if it has not moved for this optimizer step yet, and is to. A collective."""
        stepped = step != self._seen
        self._seen = step
        if stepped and step % self.steps == 0:
            self.move()

    def move(self) -> None:
        """Move the reference towards the policy once. A collective."""
        mix_into(self.module.reference, self.module.policy, self.alpha, self.precise)

    def save_weights(self, checkpoint: dict[str, Any]) -> None:
        """Save the reference; others are loaded again by name. A collective."""
        # A user's callback that saves after a step is called before this part is.
        self._follow(self.module.trainer.global_step)
        keep = self.module.global_rank == 0
        checkpoint["reference"] = reference_weights(self.module.reference, self.precise, keep=keep)

    def load_weights(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the reference. A collective."""
        if "reference" in checkpoint:
            load_reference_weights(self.module.reference, checkpoint["reference"], self.precise)


@torch.no_grad()
def mix_into(reference: nn.Module, policy: nn.Module, alpha: float, precise: dict[str, Tensor]) -> None:
    """``reference ← alpha * policy + (1 - alpha) * reference``, in place. A collective when sharded.

    A value head that the policy has and the reference lacks stays out of it.

    Args:
        reference: The model that moves.
        policy: The model that it moves towards.
        alpha: In [0, 1].
        precise: The weights of 16 bits of the reference in float32, by name, which are made here and move with it: on
            every rank, or of divided weights on rank 0, in CPU memory.
    """
    weights = dict(unwrap(policy).named_parameters())
    for name, old in unwrap(reference).named_parameters():
        new = weights[name]
        with full_parameters([new]), full_parameters([old], modifier_rank=0):
            if old.dtype not in HALF or not _keeps_precise(old):
                old.lerp_(new.to(old.dtype), alpha)
                continue
            if name not in precise:
                precise[name] = old.detach().to("cpu" if _is_divided(old) else old.device, torch.float32, copy=True)
            precise[name].lerp_(new.to(precise[name]), alpha)
            old.copy_(precise[name])


def _is_divided(parameter: Tensor) -> bool:
    return is_sharded(parameter) or tensor_part(parameter) is not None


def _keeps_precise(parameter: Tensor) -> bool:
    """Whether this rank keeps a parameter in float32: what is divided is changed by rank 0 for all."""
    return not _is_divided(parameter) or get_rank() == 0


def reference_weights(reference: nn.Module, precise: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Full weights on the CPU, on ranks with ``keep``; the others only take part. A collective when sharded.

    Those of ``precise``, see :func:`mix_into`, are float32.
    """
    weights = {}
    for name, tensor in ModuleWeights(reference, check_finite=False):
        if keep:
            weights[name] = precise.get(name, tensor).to("cpu", copy=True)
    return weights


@torch.no_grad()
def load_reference_weights(reference: nn.Module, weights: Mapping[str, Tensor], precise: dict[str, Tensor]) -> None:
    """Set the weights that :func:`reference_weights` returned on rank 0, in place on all ranks. A collective.

    ``precise``, see :func:`mix_into`, is filled with those of weights of 16 bits.
    """
    precise.clear()
    for name, parameter in unwrap(reference).named_parameters():
        with full_parameters([parameter], modifier_rank=0):
            if parameter.dtype not in HALF:
                if name in weights:
                    parameter.copy_(weights[name])
            elif _keeps_precise(parameter):
                found = weights.get(name, parameter)
                precise[name] = found.to(
                    "cpu" if _is_divided(parameter) else parameter.device, torch.float32, copy=True
                )
                if not _is_divided(parameter):
                    broadcast(precise[name])
                parameter.copy_(precise[name])
            if not is_sharded(parameter):
                broadcast(parameter.data)
