"""Weights as files of ``save_pretrained`` hold them: whole folders, or a few tensors at a time for engines.

Transformers 5 may name tensors differently in memory, and hold the experts of a mixture in one. ``save_pretrained``
converts a whole state; for a sharded model :func:`saved_layout` does the same group by group. Written for Transformers
5.19, whose ``core_model_loading`` is not part of its documented interface.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.first_lines import without_weights_bar


def save_weights(model: nn.Module, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that ``from_pretrained`` of the model's class loads, from full weights in their own dtype.

    Of ``model``, possibly sharded or quantized, only class, configuration and persistent buffers (a router's trained
    correction) are used. Tied weights may be missing.
    """
    original = cast(Any, model)
    config = copy.deepcopy(original.config)
    if hasattr(config, "quantization_config"):  # the weights are not in 4 bits
        del config.quantization_config
    with torch.device("meta"):
        empty: Any = type(original)(config)
    empty.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
    if original.can_generate():
        empty.generation_config = original.generation_config
    kept = set(empty.state_dict())
    buffers = {name: buffer.detach().cpu() for name, buffer in original.named_buffers() if name in kept}
    with without_weights_bar():
        empty.save_pretrained(folder, state_dict={**buffers, **weights})


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a model that are converted together, usually one."""

    members: tuple[str, ...]
    """Their names in the model."""
    _patterns: tuple[str, ...]
    _first: str
    _transform: Any
    _model: Any

    def convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors of the files by name, from the group's whole tensors; ``meta`` tensors give shapes only."""
        transform = copy.deepcopy(self._transform)
        for name, pattern, tensor in zip(self.members, self._patterns, tensors, strict=True):
            transform.add_tensor(self._first, name, pattern, tensor)
        found: Mapping[str, Any] = transform.convert(self._first, model=self._model, config=self._model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}


def saved_layout(model: nn.Module, names: Sequence[str]) -> list[TensorGroup]:
    """Groups of tensors of an unwrapped model that become those of its files, in the order of ``names``."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = [one.reverse_transform() for one in reversed(_conversions(model))]
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    members: dict[str, list[tuple[str, str]]] = {}
    transform: dict[str, Any] = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings depend on an earlier name in this order
        first, pattern = rename_source_key(name, renamings, converters, reverse=True)
        transform.setdefault(first, WeightRenaming(name, first) if pattern is None else by_pattern[pattern])
        members.setdefault(first, []).append((name, name if pattern is None else pattern))
    groups = []
    for first, found in members.items():
        originals, patterns = zip(*found, strict=True)
        groups.append(TensorGroup(originals, patterns, first, transform[first], model))
    place = {name: index for index, name in enumerate(names)}
    return sorted(groups, key=lambda group: place[group.members[0]])


def _conversions(model: Any) -> list[Any]:
    """The conversions that ``from_pretrained`` applied to this model, or would apply."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return list(known)
    # For a model that was not loaded from files it is unknown whether these had a prefix.
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [one for one in found if not isinstance(one, PrefixChange)]
