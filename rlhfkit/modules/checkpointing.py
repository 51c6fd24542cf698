"""``CheckpointMixin``: contents of a module's checkpoints, and saving its models as Hugging Face folders."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from rlhfkit.checkpoints import ExactResume
from rlhfkit.checkpoints.resume import attach_exact_resume
from rlhfkit.models import ScalarModel
from rlhfkit.models.forward import unwrap
from rlhfkit.models.load import tokenizer_files, tokenizer_of_files
from rlhfkit.models.lora import frozen_weight_names, save_adapter
from rlhfkit.models.weights.files import save_weights
from rlhfkit.parts import Part
from rlhfkit.protocols import SeesImages
from rlhfkit.rollout.weight_sync.source import AdapterWeights, ModuleWeights
from rlhfkit.trainer_parts import callbacks_of

CLASSES = "module_classes"
"""Key of a checkpoint: names of the module's class and its bases, by which ``rlhfkit export`` builds it again."""

TOKENIZER = "tokenizer_files"
"""Key of a checkpoint: the run's tokenizer as files, if it is not the model's own."""


class CheckpointMixin(L.LightningModule):
    """Checkpoints and exports of a module whose children are Hugging Face models, built in ``configure_model``.

    Checkpoints leave out weights that can be loaded again by name.
    """

    frozen_children: tuple[str, ...] = ("reference",)
    """Children that are never trained and can be loaded again by name: left out of checkpoints."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that is saved with a model; abstract."""
        # Abstract by hand: the class is mixed into LightningModules, which are no abc.ABC.
        raise NotImplementedError(f"{type(self).__name__} has to define tokenizer")

    @property
    def given_tokenizer(self) -> Any:
        """The tokenizer that checkpoints hold; ``None``: it is loaded by the model's name."""
        return None

    def take_tokenizer(self, tokenizer: Any, giver: str) -> None:
        """Use a tokenizer from ``giver``; abstract."""
        raise NotImplementedError(f"{type(self).__name__} has to define take_tokenizer")

    def restore_tokenizer(self, checkpoint: Mapping[str, Any]) -> None:
        """Use the tokenizer of a checkpoint, if it has one and none was given."""
        if TOKENIZER in checkpoint and self.given_tokenizer is None:
            trusted = bool(getattr(self, "trust_remote_code", False))
            self.take_tokenizer(tokenizer_of_files(checkpoint[TOKENIZER], trust_remote_code=trusted), "the checkpoint")

    @property
    def hparams_initial(self) -> Any:
        """The hyperparameters that loggers write: plain values, as in checkpoints."""
        return copy.deepcopy(self.hparams)

    def save_pretrained(
        self, folder: str | Path, *, child: str = "policy", adapter: bool = False, dtype: torch.dtype | None = None
    ) -> Path:
        """Save a child and its tokenizer for ``from_pretrained`` and engines, and return the folder. A collective.

        Of a model that sees images the processor is saved, too.

        Args:
            folder: Created when missing.
            child: Name of the child.
            adapter: Save only its LoRA adapter, for peft, instead of merging it into the weights.
            dtype: Type of the saved weights; ``None``: their own.

        Raises:
            ValueError: If there is no such child, or its adapter is missing or not all that was trained.
        """
        parts: Sequence[Part] = getattr(self, "parts", ())
        if any(part.export(child, Path(folder), adapter=adapter, dtype=dtype) for part in parts):
            return Path(folder)
        model = getattr(self, child, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{type(self).__name__} has no child {child!r}; it has "
                + ", ".join(name for name, _ in self.named_children())
            )
        source = AdapterWeights(model, dtype=dtype) if adapter else ModuleWeights(model, dtype=dtype)
        weights = {name: tensor.cpu().clone() for name, tensor in source if self.global_rank == 0}
        if self.global_rank == 0:
            write_pretrained(model, folder, weights, adapter=adapter)
            seeing: Any = self.image_processor if isinstance(self, SeesImages) else None
            if seeing is not None:
                seeing.processor.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        if self._trainer is not None:
            self._trainer.strategy.barrier()
        return Path(folder)

    def loaded_by_name(self) -> Callable[[str], bool]:
        """Return a test whether a state-dict name is of a frozen child or of a frozen weight beside adapters."""
        children = tuple(f"{child}." for child in self.frozen_children)
        frozen = {f"{child}.{name}" for child, m in self.named_children() for name in frozen_weight_names(m)}

        def by_name(name: str) -> bool:
            weight = "".join(name.rpartition(".weight")[:2])  # weights of 4 bits have state beside them: weight.absmax
            return name.startswith(children) or name in frozen or weight in frozen

        return by_name

    def configure_callbacks(self) -> list[Callback]:
        """Add :class:`~rlhfkit.checkpoints.ExactResume`; overrides return ``[*super().configure_callbacks(), ...]``."""
        there = any(isinstance(callback, ExactResume) for callback in callbacks_of(self.trainer))
        return [] if there else [ExactResume()]

    def setup(self, stage: str) -> None:
        """Add :class:`~rlhfkit.checkpoints.ExactResume` if an overridden :meth:`configure_callbacks` did not.

        A subclass that overrides both calls ``super()`` in one of them.
        """
        if self._trainer is not None:
            attach_exact_resume(self._trainer, self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remove the weights that are loaded by name; save the names of the classes and a tokenizer that was given."""
        ours = [
            kind for kind in type(self).__mro__ if issubclass(kind, CheckpointMixin) and kind is not CheckpointMixin
        ]
        checkpoint[CLASSES] = [f"{kind.__module__}:{kind.__qualname__}" for kind in ours]
        by_name = self.loaded_by_name()
        state = checkpoint.get("state_dict") or {}
        checkpoint["state_dict"] = {name: value for name, value in state.items() if not by_name(name)}
        if self.given_tokenizer is not None and self.global_rank == 0:
            checkpoint[TOKENIZER] = tokenizer_files(self.given_tokenizer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if it is not built yet, and take the tokenizer, as in ``load_from_checkpoint``.

        A run has its tokenizer from its DataModule or the module, also when it is resumed.
        """
        self.configure_model()
        if self._trainer is None:
            self.restore_tokenizer(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; those that are loaded by name may be missing.

        Raises RuntimeError with ``strict`` if others are missing or unknown; it lists them.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        by_name = self.loaded_by_name()
        wrong = [name for name in result.missing_keys if not by_name(name)] + list(result.unexpected_keys)
        if strict and wrong:
            raise RuntimeError(f"the checkpoint does not fit {self.model_name!r}: {wrong[:8]} are missing or unknown")
        return result


def write_pretrained(model: nn.Module, folder: str | Path, weights: Mapping[str, Tensor], *, adapter: bool) -> None:
    """Write full weights of a model, which may be wrapped, or those of its LoRA adapter, for ``from_pretrained``."""
    bare: Any = unwrap(model)
    if adapter:
        save_adapter(bare, folder, weights)
    elif isinstance(bare, ScalarModel):
        bare.save_pretrained(folder, state_dict=weights)
    else:
        save_weights(bare, folder, weights)
