"""``CheckpointMixin``: what of a module goes into checkpoints, and how its models become Hugging Face folders."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from rlhfkit.checkpoints import ExactResume
from rlhfkit.checkpoints.resume import attach
from rlhfkit.models import ScalarModel, unwrap
from rlhfkit.models.lora import frozen_weight_names, save_adapter
from rlhfkit.models.weights.files import save_weights
from rlhfkit.rollout.weight_sync.source import AdapterWeights, ModuleWeights

CLASSES = "module_classes"
"""Key of a checkpoint: names of the module's class and its bases, for whoever makes it again."""


class CheckpointMixin(L.LightningModule):
    """The saving half of :class:`~rlhfkit.modules.base.PolicyModule`.

    Its children are Hugging Face models, built by name in ``configure_model``. What can be loaded again by name is left
    out of checkpoints.
    """

    frozen_children: ClassVar[tuple[str, ...]] = ("reference",)
    """Children that are never trained and can be loaded again by name: left out of checkpoints."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that is written beside a model."""
        # Abstract: whoever mixes this in has one.
        raise NotImplementedError(f"{type(self).__name__} has to say what its tokenizer is")

    @property
    def hparams_initial(self) -> Any:
        """What loggers write down: the hyperparameters as checkpoints hold them, all plain values."""
        return copy.deepcopy(self.hparams)

    def save_pretrained(
        self, folder: str | Path, *, child: str = "policy", adapter: bool = False, dtype: torch.dtype | None = None
    ) -> Path:
        """Write a child and its tokenizer so that ``from_pretrained`` and every engine can load them. A collective.

        Args:
            folder: Made when missing.
            child: Which of the module's models.
            adapter: Write its LoRA adapter alone, for peft, instead of merging it into the weights.
            dtype: Type of the written weights; ``None``: their own.

        Returns:
            The folder.

        Raises:
            ValueError: If there is no such child, or its adapter is missing or not all that was trained.
        """
        model = getattr(self, child, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"{type(self).__name__} has no child {child!r}; it has "
                + ", ".join(name for name, _ in self.named_children())
            )
        source = AdapterWeights(model, dtype=dtype) if adapter else ModuleWeights(model, dtype=dtype)
        weights = {name: tensor.cpu().clone() for name, tensor in source if self.global_rank == 0}
        if self.global_rank == 0:
            bare: Any = unwrap(model)
            if adapter:
                save_adapter(bare, folder, weights)
            elif isinstance(bare, ScalarModel):
                bare.save_pretrained(folder, state_dict=weights)
            else:
                save_weights(bare, folder, weights)
            self.tokenizer.save_pretrained(folder)
        if self._trainer is not None:
            self._trainer.strategy.barrier()
        return Path(folder)

    def loaded_by_name(self) -> Callable[[str], bool]:
        """A test of names of the state: of a frozen child, or of a frozen weight beside adapters?"""
        children = tuple(f"{child}." for child in self.frozen_children)
        frozen = {f"{child}.{name}" for child, m in self.named_children() for name in frozen_weight_names(m)}

        def by_name(name: str) -> bool:
            weight = "".join(name.rpartition(".weight")[:2])  # weights of 4 bits have state beside them: weight.absmax
            return name.startswith(children) or name in frozen or weight in frozen

        return by_name

    def configure_callbacks(self) -> list[Callback]:
        """Bring along what makes checkpoints exact and whole; see :class:`~rlhfkit.checkpoints.ExactResume`.

        A module that brings callbacks of its own returns ``[*super().configure_callbacks(), ...]``.
        """
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return [] if any(isinstance(callback, ExactResume) for callback in callbacks) else [ExactResume()]

    def setup(self, stage: str) -> None:
        """Add :class:`~rlhfkit.checkpoints.ExactResume` if :meth:`configure_callbacks` was overridden and lost it.

        A module that overrides both calls ``super()`` in one of them.

        Args:
            stage: Not used.
        """
        if self._trainer is not None:
            attach(self._trainer, self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out what is loaded by name: frozen children, and what adapters leave as it was. Note the classes."""
        ours = [
            kind for kind in type(self).__mro__ if issubclass(kind, CheckpointMixin) and kind is not CheckpointMixin
        ]
        checkpoint[CLASSES] = [f"{kind.__module__}:{kind.__qualname__}" for kind in ours]
        by_name = self.loaded_by_name()
        state = checkpoint.get("state_dict") or {}
        checkpoint["state_dict"] = {name: value for name, value in state.items() if not by_name(name)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Build the network if nobody has, so that ``load_from_checkpoint`` has something to fill."""
        self.configure_model()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights; frozen children and the weights beside adapters may be missing, everything else must fit.

        Args:
            state_dict: Weights by name.
            strict: Raise when names do not fit.
            assign: See :meth:`torch.nn.Module.load_state_dict`.

        Raises:
            RuntimeError: If names do not fit; it lists them.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        by_name = self.loaded_by_name()
        wrong = [name for name in result.missing_keys if not by_name(name)] + list(result.unexpected_keys)
        if strict and wrong:
            raise RuntimeError(f"the checkpoint does not fit {self.model_name!r}: {wrong[:8]} are missing or unknown")
        return result
