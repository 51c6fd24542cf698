"""Which model families can be packed, and which can continue texts from a cache of keys and values.

No attribute tells whether every layer that mixes tokens separates the sequences of a packed row: attention may ignore
the layout, have soft caps or sinks of its own, count positions itself, or be mixed with recurrent layers. So families
of Transformers are named here, and ``tests/models/test_families.py`` compares each with its own results for one
sequence at a time. Other models are padded, with their own attention. If packed attention is asked for by name, they
are packed too; the first batch of a fit then compares a row with what it is alone
(:func:`rlhfkit.models.heads.row_difference`).
"""

import logging
from functools import cache
from typing import Any, cast

from torch import nn

from rlhfkit.models.attention.packed import PACKED_ATTENTION, PACKED_ATTENTIONS, register_packed_attention

log = logging.getLogger(__name__)

_PACKED = """
afmoe apertus arcee bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4
exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode
gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax jais2 jetmoe llama
longcat_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3
olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 youtu
"""
_CACHED = "bloom codegen falcon gpt_neo gpt_neox_japanese gpt_oss gptj mpt nemotron stablelm xglm"
_OTHERS = """
bamba falcon_h1 granitemoehybrid jamba lfm2 llama4_text mamba mamba2 minimax moshi nemotron_h qwen3_5_moe_text
qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba2
"""

PACKED = frozenset(_PACKED.split())
"""Transformers' ``model_type`` of the families that are packed, where :func:`packing_problem` finds nothing else."""

CACHED = PACKED | frozenset(_CACHED.split())
"""Families whose caches of keys and values continue a batch of texts that are padded on the left."""

KNOWN = CACHED | frozenset(_OTHERS.split())
"""All families that are tested: their configurations say how logits follow from the output layer."""

VISION_PACKED = frozenset({"idefics3", "llava", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "smolvlm"})
"""``model_type`` of families that see images and are packed, if their language model is (that of Qwen always)."""

_VISION_TEXTS = frozenset({"qwen2_5_vl_text", "qwen3_vl_text"})

BOTH_WAYS = frozenset({"gemma3"})
"""``model_type`` of families in which tokens of an image see later ones of it: only their texts can be packed."""

NOT_PACKED = {
    "doge": "its masks depend on the tokens",
    "gpt_oss": "its attention has learned sinks, which packed attention does not compute",
    "granite_swa": "its attention has learned sinks, which packed attention does not compute",
    "granitemoe_swa": "its attention has learned sinks, which packed attention does not compute",
    "mimo_v2_flash": "its attention has learned sinks, which packed attention does not compute",
    "moshi": "keyword arguments do not reach its attention",
    "nemotron": "keyword arguments do not reach its attention",
}
"""Why families that use Transformers' attention interface cannot be packed all the same."""

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers, in ``layer_types`` of a configuration, that attend to all or to the last tokens of a sequence."""


def sees_images(config: Any) -> bool:
    """Whether a configuration is of a tested family that sees images, and has a vision part."""
    known = getattr(config, "model_type", None) in VISION_PACKED | BOTH_WAYS
    return known and getattr(config, "vision_config", None) is not None


def attention_cap(config: Any) -> float | None:
    """Soft cap of the attention scores; ``None``: there is none."""
    cap: float | None = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return cap


def packing_problem(model: nn.Module, *, untested: bool = False) -> str | None:
    """Why sequences of this model's family cannot be packed into one row; ``None`` if they can.

    ``untested``: also accept families of which it is not known.
    """
    config = cast(Any, model).config
    kind, others = config.get_text_config().model_type, _other_layers(model)
    if not has_interface(model):
        return "its attention does not go through Transformers' attention interface"
    if attention_cap(config) is not None:
        return (
            f"its attention scores have a soft cap ({attention_cap(config):g}), which packed attention does not compute"
        )
    if others is not None:
        return others
    if config.model_type in BOTH_WAYS and not untested:
        return "tokens of an image see later ones of it. attention='buckets' packs it for training on texts alone"
    if kind in NOT_PACKED:
        return NOT_PACKED[kind]
    seeing = kind in _VISION_TEXTS and config.model_type in VISION_PACKED
    if ((kind in PACKED or seeing) and is_known(model)) or untested:
        return None
    return (
        f"its family ({kind}, {type(model).__module__}) is not among those that are tested with packed rows. "
        "attention='buckets' packs it, and training then compares a row of the first batch with what it is alone"
    )


def _other_layers(model: nn.Module) -> str | None:
    """What a model has beside attention to all or the last tokens; ``None``: nothing that is known."""
    kinds = set(getattr(cast(Any, model).config.get_text_config(), "layer_types", None) or ())
    if kinds - ATTENTION_LAYERS:
        return f"it has layers of {', '.join(sorted(kinds - ATTENTION_LAYERS))}"
    return "it has recurrent layers" if getattr(model, "_is_stateful", False) and not kinds else None


def is_known(model: nn.Module) -> bool:
    """Whether an unwrapped model is of a tested family and has Transformers' own code, not a user's or the hub's."""
    kind = cast(Any, model).config.get_text_config().model_type
    return kind in KNOWN | _VISION_TEXTS and type(model).__module__.split(".")[0] in ("transformers", "rlhfkit")


def has_interface(model: nn.Module) -> bool:
    """Whether the class declares that it uses Transformers' attention interface."""
    return bool(getattr(model, "_supports_attention_backend", False))


def exact_attention(model: nn.Module) -> str | None:
    """The ``attn_implementation`` that is exact for padded batches of a model; ``None`` if the default one is.

    ``eager`` where the default ``sdpa`` ignores soft caps (Gemma 2).
    """
    return "eager" if has_interface(model) and attention_cap(cast(Any, model).config) is not None else None


def cache_problem(model: nn.Module) -> str | None:
    """Why a batch of texts cannot be continued from a cache by this model's family; ``None``: it can.

    Recurrent layers may read the padding on the left of a shorter text, models may count positions themselves, and the
    rows of some caches cannot be selected.

    Args:
        model: A Hugging Face causal language model; only its class and configuration are used.
    """
    text = cast(Any, model).config.get_text_config()
    others = _other_layers(model)
    if others is not None:
        return others
    if text.model_type == "falcon" and text.alibi:
        return "its attention counts positions from the padding on (ALiBi)"
    if text.model_type not in CACHED | _VISION_TEXTS or not is_known(model):
        return f"its family ({text.model_type}) is not among those whose cache is tested"
    return None


def takes_finished_masks(model: nn.Module) -> bool:
    """Whether a model's family continues texts as well with the masks that Transformers would make of theirs.

    Only where all layers attend to all tokens by ``sdpa``: those with windows have masks of their own.

    Args:
        model: As for :func:`cache_problem`, with the attention that it will run with.
    """
    config = cast(Any, model).config.get_text_config()
    windows = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    whole = not windows and kinds == {"full_attention"} and config._attn_implementation == "sdpa"
    return whole and config.model_type in PACKED and is_known(model)


def use_packed_attention(model: nn.Module, attention: str | None = None) -> None:
    """Switch a model's text part in place to packed attention if supported, else, with a log message, to an exact one.

    ``attention`` is a key of ``PACKED_ATTENTIONS``, :data:`PACKED_ATTENTION`, or ``None``, which is ``auto``. A family
    that cannot be packed keeps the flash attention that it was loaded with.

    Raises:
        ValueError: If ``varlen``, ``buckets`` or :data:`PACKED_ATTENTION` is asked for and the family cannot be packed.
    """
    register_packed_attention()
    asked = attention in ("varlen", "buckets", PACKED_ATTENTION)
    name, why = type(model).__name__, packing_problem(model, untested=asked)
    text = cast(Any, model).config.get_text_config()
    if why is None:
        text._attn_implementation = PACKED_ATTENTIONS.get(attention or "auto", PACKED_ATTENTION)
    elif asked:
        raise ValueError(f"attention={attention!r} would be wrong for {name}: {why}; leave attention out")
    else:
        exact = exact_attention(model) if attention in (None, "auto") else None
        if exact is not None:
            text._attn_implementation = exact
        _warn_once(
            f"{name} is not packed: {why}. Its batches are padded and run with Transformers' own attention "
            f"({text._attn_implementation}), which is slower"
        )


def use_transformers_attention(model: nn.Module) -> None:
    """Switch a model to the Transformers attention that is exact for its family, for use with a key-value cache."""
    hugging_face: Any = model
    own = exact_attention(model) or hugging_face.get_correct_attn_implementation(None)
    hugging_face.config.get_text_config()._attn_implementation = own


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
