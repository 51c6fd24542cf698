"""Attention for packed batches: many sequences in one row, each seeing only itself, on every device.

Linear layers compute real tokens only, and so does attention where there is a kernel for sequences of different lengths
(:mod:`~rlhfkit.models.attention.varlen`); elsewhere sequences of similar length are padded to one
(:func:`~rlhfkit.models.attention.varlen.bucket_attention`). Registered with Transformers under
:data:`PACKED_ATTENTIONS`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhfkit.models.attention.layout import AttentionOptions, PackedLayout
from rlhfkit.models.attention.varlen import Case, attend, bucket_attention, choose_kernel, varlen_attention

PACKED_ATTENTION = "rlhfkit_packed"
PACKED_ATTENTIONS = {
    "auto": PACKED_ATTENTION,
    "varlen": f"{PACKED_ATTENTION}_varlen",
    "flash_attention_2": f"{PACKED_ATTENTION}_fa2",  # Transformers treats names that contain "flash" as its own
    "flash_attention_3": f"{PACKED_ATTENTION}_fa3",
    "buckets": f"{PACKED_ATTENTION}_buckets",
}
"""Transformers' ``attn_implementation`` for each kernel that can be asked for."""
_MASKLESS = {name: f"{name}_maskless" for name in PACKED_ATTENTIONS.values()}
"""The same under names for which Transformers makes no masks."""


def has_packed_attention(model: nn.Module) -> bool:
    """Whether the text part of a Hugging Face model has our packed attention, with any kernel."""
    config: Any = cast(Any, model).config.get_text_config()
    return config._attn_implementation in PACKED_ATTENTIONS.values()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    packed_layout: PackedLayout | None = None,
    kernel: str = "auto",
    **unused: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: causal attention, over packed rows when there is a layout.

    ``query`` is (1, heads, N, D) packed, or (B, heads, T, D); ``key`` and ``value`` have key heads, and are longer when
    there is a cache. ``attention_mask`` comes only from a caller (generation with padding). ``scaling`` is 1/sqrt(D)
    when ``None``; ``sliding_window`` includes the position itself; ``is_causal`` is the layer's attribute when
    ``None``, as in Transformers: false for layers of a vision tower. ``kernel`` is a key of :data:`PACKED_ATTENTIONS`.

    Returns:
        (1, N, heads, D) or (B, T, heads, D), and no weights.

    Raises:
        ValueError: If the model gives a soft cap or sinks, which are not computed.
    """
    for name in ("softcap", "s_aux"):
        if unused.get(name) is not None:
            raise ValueError(
                f"packed attention does not compute {name}, which {type(module).__name__} gives: load the model with "
                "attention='eager'"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options = AttentionOptions(scaling, dropout, sliding_window)
    if packed_layout is None:
        out = attend(query, key, value, attention_mask, options, causal)
        return out.transpose(1, 2).contiguous(), None
    packed_layout.readers.add(id(module))
    query, key, value = query[0], key[0], value[0]
    if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        # PyTorch does so for its own attention; norms of queries and keys may have left them in float32.
        query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))

    def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        function = choose_kernel(Case.of(query, key, value, dropout), kernel)
        if function is None:
            return bucket_attention(query, key, value, packed_layout, options)
        return varlen_attention(function, query, key, value, packed_layout, options)

    if packed_layout.shared is None:
        return whole(query, key, value)[None], None
    return packed_layout.shared(query, key, value, packed_layout, whole, options)[None], None


def _mask_if_given(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Transformers' mask interface: no mask, unless the caller gave a padding mask."""
    if attention_mask is None:
        return None
    from transformers.masking_utils import sdpa_mask

    return cast("Tensor | None", sdpa_mask(*args, attention_mask=attention_mask, **kwargs))


@contextmanager
def without_masks(model: nn.Module) -> Iterator[None]:
    """Forward passes of a Hugging Face model with packed attention and without padding on the left.

    Transformers (up to 5.23) reads the positions of such a pass before it asks for a mask, to find packed sequences by
    itself, for which the host waits. For an attention without a mask function it does not.
    """
    config: Any = cast(Any, model).config.get_text_config()
    name = config._attn_implementation
    if name not in _MASKLESS:
        yield
        return
    config._attn_implementation = _MASKLESS[name]
    try:
        yield
    finally:
        config._attn_implementation = name


def register_packed_attention() -> None:
    """Register :data:`PACKED_ATTENTIONS` with Transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for kernel, name in PACKED_ATTENTIONS.items():
        function = packed_attention if kernel == "auto" else partial(packed_attention, kernel=kernel)
        AttentionInterface.register(name, function)
        AttentionInterface.register(_MASKLESS[name], function)
        AttentionMaskInterface.register(name, _mask_if_given)
