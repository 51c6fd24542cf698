"""``MovingReferenceModule``: a policy whose reference model follows it every so many optimizer steps (TR-DPO)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.distributed import full_parameters, get_rank, get_world_size, is_sharded, tensor_part
from rlhfkit.models import has_adapter, unwrap
from rlhfkit.models.load import precision_dtype
from rlhfkit.modules.arguments import refuse_without_effect
from rlhfkit.modules.base import PolicyModule
from rlhfkit.roles import FrozenModel, ModelPool
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rlhfkit.validation import check_integer, check_number

HALF = (torch.float16, torch.bfloat16)


class MovingReferenceModule(PolicyModule):
    """A :class:`PolicyModule` whose reference model may move towards the policy, wherever it is.

    Args:
        model: Folder or hub name of the policy.
        ref_model_sync_steps: Move the reference towards the policy every so many optimizer steps (τ of TR-DPO,
            Gorbatovski et al., 2024, arXiv:2404.09656; 512 in TRL); ``None``: never.
        ref_model_mixup_alpha: α of that move, ``ref ← α policy + (1 - α) ref``; 0.6 as in the paper and TRL. 1 is the
            paper's hard update; a small α every step is an exponential moving average. Of a reference in 16 bits a
            float32 copy is kept, in which it moves: small steps would round away.
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range, or there is no reference model to move.
    """

    def __init__(
        self,
        model: str,
        *,
        ref_model_sync_steps: int | None = None,
        ref_model_mixup_alpha: float = 0.6,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_integer("ref_model_sync_steps", ref_model_sync_steps, minimum=1, optional=True)
        check_number("ref_model_mixup_alpha", ref_model_mixup_alpha, minimum=0, maximum=1)
        if ref_model_sync_steps is None:
            given = {"ref_model_mixup_alpha": ref_model_mixup_alpha != 0.6}
            refuse_without_effect(given, "ref_model_sync_steps=None, a reference that does not move")
        self.ref_model_sync_steps = ref_model_sync_steps
        self.ref_model_mixup_alpha = ref_model_mixup_alpha
        self.reference_pool: FrozenModel | None = None
        """The replicas of the reference model; ``None``: it is in the module, or there is none."""
        self._precise_reference: dict[str, Tensor] = {}

    @property
    def reference_moves(self) -> bool:
        """Whether the reference follows the policy."""
        return self.ref_model_sync_steps is not None

    def check_reference_moves(self) -> None:
        """Raise ValueError if the reference should move and is no copy of the policy; called when both are built."""
        if self.ref_model_sync_steps is None or self.reference_pool is not None:
            return
        if has_adapter(self.policy) or not hasattr(self, "reference"):
            raise ValueError(
                "ref_model_sync_steps moves a full copy of the policy, and here there is none (adapters are trained, "
                "or no reference model is used): leave it out"
            )

    # ------------------------------------------------------------------ moving

    @property
    def _moving_pool(self) -> ModelPool | None:
        """The replicas, which only a pool has weights for; a server's model is refused when the module is made."""
        return self.reference_pool if isinstance(self.reference_pool, ModelPool) else None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Make the step, and move the reference every ``ref_model_sync_steps``."""
        super().optimizer_step(*args, **kwargs)
        steps = self.ref_model_sync_steps
        if steps is not None and (self.trainer.global_step + 1) % steps == 0:  # Lightning counts this step afterwards
            self.move_reference()

    def move_reference(self) -> None:
        """Move the reference towards the policy once. A collective."""
        alpha, pool = self.ref_model_mixup_alpha, self._moving_pool
        if pool is None:
            mix_into(self.reference, self.policy, alpha, self._precise_reference)
        else:
            pool.follow(ModuleWeights(self.policy), alpha, dtype=precision_dtype(self.trainer.precision))

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a reference that moves; others are loaded again by name."""
        super().on_save_checkpoint(checkpoint)
        if not self.reference_moves:
            return
        if self._moving_pool is None:
            keep = self.global_rank == 0
            checkpoint["reference"] = reference_weights(self.reference, self._precise_reference, keep=keep)
        else:
            checkpoint["reference_pool"] = self._moving_pool.moved_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if needed, and restore a reference that moves."""
        super().on_load_checkpoint(checkpoint)
        if not self.reference_moves:
            return
        if self._moving_pool is not None and "reference_pool" in checkpoint:
            self._moving_pool.load_moved_state(checkpoint["reference_pool"])
        elif self._moving_pool is None and "reference" in checkpoint:
            load_reference_weights(self.reference, checkpoint["reference"], self._precise_reference)


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
                if get_world_size() > 1 and not _is_divided(parameter):
                    torch.distributed.broadcast(precise[name], src=0)
                parameter.copy_(precise[name])
            if get_world_size() > 1 and not is_sharded(parameter):
                torch.distributed.broadcast(parameter.data, src=0)
