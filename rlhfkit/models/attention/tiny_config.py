"""A tiny copy of a model's configuration that keeps everything that affects how its attention works.

The first few layers that contain every kind, small hidden sizes, few heads, a small vocabulary, and windows shorter
than the sequences of a check. The head size, positions, experts and their groups stay: they depend on one another in
the model's own code.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

VOCABULARY = 64
WINDOW = 3
_FEED_FORWARD = 8
_MOST_LAYERS = 24  # from numeric patterns; lists of layer kinds may need more

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_layers_per_stack", "num_blocks")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_FEED_FORWARD_NAME = re.compile(r"intermediate_size|^n_inner$|^dff$|ffn_(dim|hidden_size)|^mlp_hidden")
_WINDOW_NAME = re.compile(r"(sliding_window|window_size|chunk_size|^local_attention|^index_topk|^floor_scale)$")
_PERIOD_NAME = re.compile(r"(pattern|period|interval|every_n_layers|sparse_step|offset|start_index|dense_replace)$")


def tiny_config(config: Any) -> Any:
    """Copy a Transformers configuration and shrink the copy, nested configurations (of a vision tower) included."""
    config = copy.deepcopy(config)
    for part in [config, *_nested(config)]:
        _shrink(part)
    return config


def _nested(config: Any) -> Iterator[Any]:
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            yield part
            yield from _nested(part)


def _first(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is an integer."""
    return next((values[name] for name in names if isinstance(values.get(name), int)), None)


def _shrink(config: Any) -> None:
    before = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers, shared = _first(before, _LAYER_COUNTS), before.get("num_kv_shared_layers") or 0
    changes: dict[str, Any] = {}
    if layers is not None:
        kept = _layers_needed(before, layers)
        if shared:  # layers that share keys of earlier ones: every kind of layer twice
            kept, changes["num_kv_shared_layers"] = min(2 * kept, layers), min(2 * kept, layers) // 2
        changes |= {name: min(kept, before[name]) for name in _LAYER_COUNTS if isinstance(before.get(name), int)}
        changes |= _per_layer(before, layers, kept)
    changes |= _widths(before)
    for name, value in before.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if number and "vocab_size" in name:
            changes[name] = VOCABULARY  # also where the model has fewer: the sequences of the check have more tokens
        elif name.endswith("token_id"):
            changes[name] = _token(value)
        elif _FEED_FORWARD_NAME.search(name) and value:
            changes[name] = _FEED_FORWARD if number else _all(changes.get(name, value), _FEED_FORWARD)
        elif _WINDOW_NAME.search(name) and number and value > WINDOW:
            changes[name] = WINDOW
    for name, value in changes.items():
        setattr(config, name, value)


def _layers_needed(before: dict[str, Any], layers: int) -> int:
    """How many of the first layers contain all kinds of layers."""
    needed = 2
    for name, value in before.items():
        if isinstance(value, list | tuple) and len(value) == layers:
            kinds = [repr(kind) for kind in value]
            if len(set(kinds)) < layers:  # otherwise they are indices
                needed = max(needed, max(kinds.index(kind) for kind in kinds) + 1)
        elif isinstance(value, list | tuple) and name == "block_types":
            needed = max(needed, len(value))
        elif _PERIOD_NAME.search(name) and isinstance(value, int):
            needed = max(needed, min(value + 1, _MOST_LAYERS))
    return min(needed, layers)


def _per_layer(before: dict[str, Any], layers: int, kept: int) -> dict[str, Any]:
    """Cut lists with an entry per layer, and lists of layer indices."""
    changes: dict[str, Any] = {}
    for name, value in before.items():
        if not isinstance(value, list | tuple) or not value:
            continue
        increasing = all(isinstance(one, int) for one in value) and list(value) == sorted(set(value))
        if increasing and re.search(r"layers|idxs|indices", name):
            changes[name] = [one for one in value if one < kept]
        elif len(value) == layers:
            changes[name] = list(value[:kept])
    return changes


def _widths(before: dict[str, Any]) -> dict[str, Any]:
    """Fewer heads of unchanged size, and a hidden size to match."""
    hidden, heads = _first(before, _HIDDEN), _first(before, _HEADS)
    if hidden is None:
        return {}
    if heads is None:  # recurrent
        return {name: min(128, hidden) for name, value in before.items() if value == hidden}
    keys = before.get("num_key_value_heads")
    fewer = min(heads, 2)
    fewer_keys = fewer if keys in (None, heads) else 1
    size = before.get("head_dim") or before.get("v_head_dim") or hidden // heads
    changes: dict[str, Any] = {name: fewer for name in _HEADS if before.get(name) == heads}
    if isinstance(keys, int):
        changes["num_key_value_heads"] = fewer_keys
    width = fewer * size // (before.get("expand") or 1)
    changes |= {name: width for name, value in before.items() if value == hidden and not isinstance(value, bool)}
    for name, value in before.items():
        if re.search(r"mamba.*heads$", name) and isinstance(value, int):  # their sizes add up to a multiple of hidden
            changes[name] = max(value * width // hidden, 1)
        elif name == "num_attention_heads_per_layer" and value:
            changes[name] = _all(value, fewer)
    return changes


def _all(value: Any, replacement: int) -> Any:
    return [replacement] * len(value) if isinstance(value, list | tuple) else value


def _token(value: Any) -> Any:
    if isinstance(value, list):
        return [_token(one) for one in value]
    return min(value, VOCABULARY - 1) if isinstance(value, int) else value
