"""Weights as files of ``save_pretrained`` hold them, a few tensors at a time.

Transformers 5 does not hold every model as its files do: the experts of a mixture, several tensors each in the files,
are one in memory, and names may differ. Engines read what files hold. ``save_pretrained`` turns the whole state back at
once; a model that is cut into shards cannot be had whole, so here the same conversions are applied group by group.

Written for Transformers 5.19, which has them in ``core_model_loading`` and keeps them out of its documented interface.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a model that are converted together, most often one."""

    members: tuple[str, ...]
    """Their names in the model."""
    _patterns: tuple[str, ...]
    _first: str
    _transform: Any
    _model: Any

    def convert(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors of the files, by name.

        Args:
            tensors: The group's, one for each of ``members``, whole; ``meta`` tensors give shapes only.
        """
        transform = copy.deepcopy(self._transform)
        for name, pattern, tensor in zip(self.members, self._patterns, tensors, strict=True):
            transform.add_tensor(self._first, name, pattern, tensor)
        found: Mapping[str, Any] = transform.convert(self._first, model=self._model, config=self._model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in found.items()}


def saved_layout(model: nn.Module, names: Sequence[str]) -> list[TensorGroup]:
    """How tensors of a model become those of its files.

    Args:
        model: Of Transformers, without wrappers.
        names: Of its parameters and buffers, without what wrappers and adapters add to them.

    Returns:
        Groups in the order of ``names``, each name in one of them.
    """
    return _grouped(model, names, [one.reverse_transform() for one in reversed(_conversions(model))])


def _conversions(model: Any) -> list[Any]:
    """What ``from_pretrained`` has done to this model, or would do."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    known = getattr(model, "_weight_conversions", None)
    if known is not None:
        return list(known)
    # Of a model that was not loaded from files nothing says whether these had a prefix.
    found = get_model_conversion_mapping(model, add_legacy=False)
    return [one for one in found if not isinstance(one, PrefixChange)]


def _grouped(model: Any, names: Sequence[str], transforms: list[Any]) -> list[TensorGroup]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    members: dict[str, list[tuple[str, str]]] = {}
    transform: dict[str, Any] = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings wait for an earlier name in this order
        first, pattern = rename_source_key(name, renamings, converters, reverse=True)
        transform.setdefault(first, WeightRenaming(name, first) if pattern is None else by_pattern[pattern])
        members.setdefault(first, []).append((name, name if pattern is None else pattern))
    groups = []
    for first, found in members.items():
        originals, patterns = zip(*found, strict=True)
        groups.append(TensorGroup(originals, patterns, first, transform[first], model))
    place = {name: index for index, name in enumerate(names)}
    return sorted(groups, key=lambda group: place[group.members[0]])
