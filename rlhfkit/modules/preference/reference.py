"""``ReferenceModule``: a policy and its reference model, which is held, computed once before training, or moves."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.distributed import full_parameters, get_world_size, is_sharded
from rlhfkit.models import has_adapter, load_causal_lm, unwrap
from rlhfkit.models.load import disable_dropout
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.precompute import (
    AnswerLogprobs,
    Pairs,
    cached_reference,
    compute_reference,
    model_fingerprint,
)
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rlhfkit.validation import check_integer, check_number


class ReferenceModule(PolicyModule):
    """A :class:`PolicyModule` that is compared with a reference model on data that is known before training.

    The reference is where the policy starts, and there are three ways to it: a frozen copy (the default), the policy
    with its adapters switched off (with ``lora=...``; no copy is held), or log-probs computed once before training and
    kept on disk (``precompute_ref_log_probs``; no copy is held either). ``ref_model`` names another one, and
    ``ref_model_sync_steps`` lets the copy follow the policy.

    Args:
        model: Folder or hub name of the policy.
        ref_model: Folder or hub name of the reference; ``None``: where the policy starts.
        precompute_ref_log_probs: Compute what the reference says about all data once, before training. The data must
            be in memory: a DataModule of ours, not a stream.
        ref_cache: Folder where that is kept; ``None``: ``reference_logprobs`` in the Trainer's ``default_root_dir``.
        ref_model_sync_steps: τ: every so many optimizer steps the reference moves towards the policy (TR-DPO,
            Gorbatovski et al., 2024, arXiv:2404.09656; TRL uses 512); ``None``: it never moves.
        ref_model_mixup_alpha: α of that move, ``ref ← α policy + (1 - α) ref``; 0.6 as in the paper and TRL.
        max_tokens_per_forward: Tokens per forward pass of ``precompute_ref_log_probs``.
        **kwargs: See :class:`PolicyModule`.

    Raises:
        ValueError: If an argument is out of range, or there is no reference model to move.
    """

    def __init__(
        self,
        model: str,
        *,
        ref_model: str | None = None,
        precompute_ref_log_probs: bool = False,
        ref_cache: str | None = None,
        ref_model_sync_steps: int | None = None,
        ref_model_mixup_alpha: float = 0.6,
        max_tokens_per_forward: int = 16384,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, **kwargs)
        check_integer("ref_model_sync_steps", ref_model_sync_steps, minimum=1, optional=True)
        check_number("ref_model_mixup_alpha", ref_model_mixup_alpha, minimum=0, maximum=1)
        check_integer("max_tokens_per_forward", max_tokens_per_forward, minimum=1)
        self.ref_model_name = ref_model
        self.precompute_ref_log_probs = precompute_ref_log_probs
        self.ref_cache = ref_cache
        self.ref_model_sync_steps = ref_model_sync_steps
        self.ref_model_mixup_alpha = ref_model_mixup_alpha
        self.max_tokens_per_forward = max_tokens_per_forward
        if self._moves and not self.uses_reference:
            raise ValueError(
                "ref_model_sync_steps moves a reference model, and with precompute_ref_log_probs or reference_free "
                "none is held: leave one of them out"
            )
        self._at_start = True  # the policy is still what it was loaded as

    # ------------------------------------------------------------------ the model

    @property
    def uses_reference(self) -> bool:
        """Whether a reference model has to be at hand during training."""
        return not self.precompute_ref_log_probs

    @property
    def needs_reference(self) -> bool:
        """Whether that is the model that the policy starts from."""
        return self.uses_reference and self.ref_model_name is None

    @property
    def _moves(self) -> bool:
        return self.ref_model_sync_steps is not None

    def configure_model(self) -> None:
        """Build the policy, and the reference model where one has to be at hand."""
        super().configure_model()
        if self.uses_reference and self.ref_model_name is not None and not hasattr(self, "reference"):
            self.reference = self.build_reference()
            # Lightning 2.6 warns of every module in eval mode when fitting starts; this one is meant to be.
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        if self._moves and (has_adapter(self.policy) or not hasattr(self, "reference")):
            raise ValueError(
                "ref_model_sync_steps moves a full copy of the policy, and here there is none (adapters are trained, "
                "or no reference model is held): leave it out"
            )

    def build_reference(self) -> nn.Module:
        """Load the reference model, frozen."""
        if self.ref_model_name is None:
            return self.build_policy().requires_grad_(False).eval()
        reference = load_causal_lm(
            self.ref_model_name,
            dtype=self.model_dtype,
            attention=self.attention,
            trust_remote_code=self.trust_remote_code,
        )
        disable_dropout(reference)
        return reference.requires_grad_(False).eval()

    # ------------------------------------------------------------------ computed before training

    def precompute(self, examples: Any) -> None:
        """Give a data set its reference log-probs by :meth:`computed_reference`, unless it has them; override it.

        Args:
            examples: What is behind a loader, or one source of a mixture.
        """

    def computed_reference(self, pairs: Pairs, logprobs: AnswerLogprobs, *details: Any) -> Tensor:
        """What the reference says about all pairs, from disk where it is known. A collective.

        Args:
            pairs: N pairs of answers.
            logprobs: What is kept of a batch.
            *details: Whatever else the numbers depend on, with a telling ``repr``.

        Returns:
            (N, 2) float32.
        """
        name = self.ref_model_name or self.model_name
        limit = self.max_tokens_per_forward
        folder = Path(self.ref_cache or Path(self.trainer.default_root_dir) / "reference_logprobs")

        def key() -> Iterator[Any]:
            yield from (model_fingerprint(name), str(self.trainer.precision), *details)

        def compute() -> Tensor:
            # Until training starts the policy is the reference; a resumed run loads it once more.
            here = self._at_start and self.ref_model_name is None
            model = self.policy if here else self.build_reference().to(self.device)
            return compute_reference(pairs, model, logprobs, self.trainer, max_tokens=limit)

        return cached_reference(pairs, key, folder, self.trainer, compute)

    def _precompute_behind(self, loaders: Any) -> None:
        if self.precompute_ref_log_probs:
            for examples in data_sets(loaders):
                self.precompute(examples)

    def on_train_start(self) -> None:
        """Compute what the reference says, before the policy moves."""
        self._precompute_behind(self.trainer.train_dataloader)
        self._precompute_behind(self.trainer.val_dataloaders)
        self._at_start = False

    def on_validation_start(self) -> None:
        """Compute what the reference says about validation data, unless that is known."""
        self._precompute_behind(self.trainer.val_dataloaders)

    def on_predict_start(self) -> None:
        """Compute what the reference says about this data, unless that is known."""
        self._precompute_behind(self.trainer.predict_dataloaders)

    # ------------------------------------------------------------------ moving

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and let the reference follow when it is time."""
        super().optimizer_step(*args, **kwargs)
        steps = self.ref_model_sync_steps
        if steps is not None and (self.trainer.global_step + 1) % steps == 0:  # Lightning counts this step afterwards
            mix_into(self.reference, self.policy, self.ref_model_mixup_alpha)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A reference that moves is saved; one that does not is loaded again by name."""
        super().on_save_checkpoint(checkpoint)
        if self._moves:
            checkpoint["reference"] = reference_weights(self.reference, keep=self.global_rank == 0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if nobody has, and bring the reference to where it was."""
        super().on_load_checkpoint(checkpoint)
        self._at_start = False
        if self._moves and "reference" in checkpoint:
            load_reference_weights(self.reference, checkpoint["reference"])


def data_sets(loaders: Any) -> list[Any]:
    """The data sets behind one loader or several; a mixture stands for its sources.

    Args:
        loaders: As the Trainer holds them.
    """
    found = [getattr(one, "examples", None) for one in (loaders if isinstance(loaders, list | tuple) else [loaders])]
    return [source for examples in found for source in getattr(examples, "sources", [examples])]


@torch.no_grad()
def mix_into(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """``reference ← alpha * policy + (1 - alpha) * reference``, one weight at a time. A collective when sharded.

    Args:
        reference: Changed in place; bare or wrapped.
        policy: Of the same architecture.
        alpha: In [0, 1].
    """
    for old, new in zip(unwrap(reference).parameters(), unwrap(policy).parameters(), strict=True):
        with full_parameters([new]), full_parameters([old], modifier_rank=0):
            old.lerp_(new.to(old.dtype), alpha)


def reference_weights(reference: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Full weights on the CPU. A collective when sharded.

    Args:
        reference: Bare or wrapped.
        keep: Whether this rank wants them; the others only take part.
    """
    weights = {}
    for name, tensor in ModuleWeights(reference, check_finite=False):
        if keep:
            weights[name] = tensor.to("cpu", copy=True)
    return weights


@torch.no_grad()
def load_reference_weights(reference: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Inverse of :func:`reference_weights`, on all ranks. A collective.

    Args:
        reference: Changed in place; bare or wrapped.
        weights: Of rank 0; the other ranks' may be empty.
    """
    for name, parameter in unwrap(reference).named_parameters():
        with full_parameters([parameter], modifier_rank=0):
            if name in weights:
                parameter.copy_(weights[name])
            if get_world_size() > 1 and not is_sharded(parameter):
                torch.distributed.broadcast(parameter.data, src=0)
