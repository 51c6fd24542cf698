"""``ModelShape``: what costs depend on of a model, read from its Transformers configuration without its weights.

Parameters are counted on a model built on PyTorch's ``meta`` device, which holds no data, so the count is exact for
every family that Transformers knows (a trillion parameters take half a second). The widths of a layer, from which
activations, keys and values are computed, come from the configuration's standard names.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from rlhfkit.models.load import Quantization, context_length, existing_name, load_config
from rlhfkit.models.lora import LoRA, adapter_base, adapter_size, saved_adapter_size
from rlhfkit.models.output_logits import output_logits

USUAL_UNCERTAINTY = 0.15
"""Relative error of activation bytes for the usual layer, see ``benchmarks/estimate.py``."""
UNKNOWN_UNCERTAINTY = 0.5
"""Stated for layers that the formulas do not describe (recurrent ones, or widths that the configuration lacks)."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Widths of a layer: numbers per token."""

    hidden: int
    """H, of the residual stream."""
    heads: int
    query: int
    """All heads' queries together."""
    key: int
    """All heads' keys."""
    value: int
    """All heads' values."""
    attention_output: int
    """The input of the attention's output projection."""
    intermediate: int
    """Of the feed-forward block, or of all that a token passes: its experts and the shared ones."""
    gated: bool = True
    """Whether the block has a gate beside the up projection (SwiGLU)."""
    normalized_heads: bool = False
    """Whether queries and keys are normalised (Qwen 3)."""
    experts_per_token: int = 0
    """Experts that a token passes; 0: no mixture."""
    key_heads: int | None = None
    """Heads of keys and values; ``None``: as many as of queries."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only language model."""

    family: str
    """``model_type`` of the configuration."""
    parameters: int
    """All of them; tied weights count once."""
    embedding: int
    """Those of the token embeddings, also when they are the output layer."""
    head: int
    """Those of an output layer that is not tied."""
    experts: int
    """Those of routed experts."""
    active: int
    """Those that a token is multiplied by: without the embedding (but with the output layer, also when tied), and of
    the experts only the chosen ones."""
    largest_tensor: int
    """Numbers in the largest weight."""
    small: int
    """Numbers in tensors of at most 100,000, which ZeRO 3 keeps whole."""
    layers: int
    vocabulary: int
    layer: LayerShape
    """An average layer."""
    cached: float
    """Numbers per token in an engine's key-value cache, all layers together."""
    cache_heads: int
    """Ways in which tensor parallelism can split the cache; 1 with latent attention (MLA)."""
    window: int | None = None
    """Tokens that layers with a window keep; ``None``: no layer has one."""
    windowed_layers: int = 0
    tied: bool = False
    context: int | None = None
    adapters: int = 0
    """Parameters of LoRA's matrices; 0: none."""
    adapted_experts: int = 0
    """Numbers of experts in one tensor with adapters, which are added to a copy of it."""
    quantized: int = 0
    """Numbers in matrices that are held in 4 bits (QLoRA)."""
    fused_head: bool = True
    """Whether log-probs are computed from the output layer without logits (:func:`~rlhfkit.losses.linear_logprobs`);
    not where a family's own code does more than scale or cap them."""
    divisible: int = 0
    """Numbers in the matrices that tensor parallelism divides, by the family's plan in Transformers; 0: it has none."""
    uncertainty: float = USUAL_UNCERTAINTY
    """Relative error of activation bytes."""

    @property
    def trained(self) -> int:
        """Parameters that get a gradient."""
        return self.adapters or self.parameters

    @property
    def backbone(self) -> int:
        """Parameters of a critic or reward model of this shape: a number per token in place of the output layer."""
        return self.parameters - self.head + self.layer.hidden

    def with_scalar_head(self) -> "ModelShape":
        """The shape of a critic or reward model that is made of this one, see :attr:`backbone`."""
        if self.vocabulary == 1:
            return self
        active = self.active - (self.head or self.embedding) + self.layer.hidden
        return replace(self, parameters=self.backbone, active=active, head=0, vocabulary=1, tied=False)


def model_shape(
    model: str | Any,
    *,
    lora: LoRA | None = None,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Describe a model.

    Args:
        model: Folder or hub name, or a Transformers configuration. A folder with an adapter: its base model and it.
        lora: Adapters that are trained in place of its weights.
        quantization: Format of the frozen weights.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ValueError: If the configuration lacks the number of layers, the hidden size or the vocabulary, or the adapters'
            targets are no layers of the model.
    """
    name = model if isinstance(model, str) else type(model).__name__
    config = load_config(model, trust_remote_code=trust_remote_code) if isinstance(model, str) else model
    text = config.get_text_config()
    missing = [field for field in ("num_hidden_layers", "hidden_size", "vocab_size") if _number(text, field) is None]
    if missing:
        raise ValueError(
            f"the configuration of {name} (model_type {text.model_type!r}) does not say its {', '.join(missing)}: "
            "describe the model yourself, with rlhfkit.costs.ModelShape"
        )
    counted = _count(config, lora, quantization, trust_remote_code)
    if isinstance(model, str) and adapter_base(existing_name(model)) is not None:
        counted.adapters = saved_adapter_size(existing_name(model))
    layer, known = _layer(text, gated=counted.gated)
    layers, vocabulary = int(text.num_hidden_layers), int(text.vocab_size)
    cached, cache_heads = _cache(text, layer)
    windowed, window = _windows(text)
    chosen = 0.0
    if counted.experts:
        chosen = counted.experts * layer.experts_per_token / max(_expert_count(text), 1)
    output = counted.head or counted.embedding
    rest = counted.total - counted.embedding - counted.head - counted.experts
    return ModelShape(
        family=str(text.model_type),
        parameters=counted.total,
        embedding=counted.embedding,
        head=counted.head,
        experts=counted.experts,
        active=round(rest + chosen + output),
        largest_tensor=counted.largest,
        small=counted.small,
        layers=layers,
        vocabulary=vocabulary,
        layer=layer,
        cached=cached * layers,
        cache_heads=cache_heads,
        window=window,
        windowed_layers=windowed,
        tied=counted.head == 0,
        context=context_length(config),
        adapters=counted.adapters,
        adapted_experts=counted.experts if lora is not None and lora.targets == "all-linear" and lora.experts else 0,
        quantized=counted.quantized,
        fused_head=counted.fused_head,
        divisible=counted.divisible,
        uncertainty=USUAL_UNCERTAINTY if known else UNKNOWN_UNCERTAINTY,
    )


# ------------------------------------------------------------------------------------------------ counting


@dataclass
class _Count:
    total: int = 0
    embedding: int = 0
    head: int = 0
    experts: int = 0
    adapters: int = 0
    quantized: int = 0
    largest: int = 0
    small: int = 0
    divisible: int = 0
    gated: bool = False
    fused_head: bool = True


def _count(config: Any, lora: LoRA | None, quantization: Quantization | None, trust_remote_code: bool) -> _Count:
    """Count the parameters of a model of this configuration, built without memory."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    count = _Count(fused_head=output_logits(model) is not None)
    plan = _tensor_plan(config.get_text_config())
    for name, parameter in model.named_parameters():  # tied weights once
        size = parameter.numel()
        count.total += size
        count.largest = max(count.largest, size)
        count.small += size if size <= 100_000 else 0
        if parameter is embedding:
            count.embedding += size
        elif head is not None and parameter is head.weight:
            count.head += size
        elif _is_expert(name, parameter):
            count.experts += size
        elif plan is not None and plan.search(name):
            count.divisible += size
    count.gated = any("gate_proj" in name or "gate_up" in name for name, _ in model.named_parameters())
    if lora is not None:
        count.adapters = adapter_size(model, lora)
    if quantization is not None:  # Transformers leaves the output layer as it is, and experts in one tensor
        linear = (one for one in model.modules() if isinstance(one, nn.Linear | Conv1D) and one is not head)
        count.quantized = sum(one.weight.numel() for one in linear)
    return count


def _tensor_plan(text: Any) -> re.Pattern[str] | None:
    """The names of parameters that the family's tensor-parallel plan divides; ``None``: it divides none.

    Weights and biases of layers whose outputs are divided (``colwise``), weights of those whose inputs are
    (``rowwise``). A plan with other styles is one that the strategy refuses.
    """
    styles = {"colwise": "(weight|bias)", "rowwise": "weight"}
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if set(plan.values()) - {*styles, "replicated_with_grad_allreduce", "embedding_rowwise"}:
        return None
    patterns = [
        re.escape(layer).replace(r"\*", r"\d+") + r"\." + styles[style]
        for layer, style in plan.items()
        if style in styles
    ]
    return re.compile(rf"(^|\.)({'|'.join(patterns)})$") if patterns else None


def _is_expert(name: str, parameter: Any) -> bool:
    return ".experts." in name and "shared" not in name and parameter.dim() >= 2


# ------------------------------------------------------------------------------------------------ widths


def _number(config: Any, *names: str) -> int | None:
    """The first of these entries of a configuration that is a number above 0; the largest of a list."""
    for name in names:
        value = getattr(config, name, None)
        value = max(value) if isinstance(value, list | tuple) and value and isinstance(value[0], int) else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _expert_count(text: Any) -> int:
    return _number(text, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts") or 0


def _layer(text: Any, *, gated: bool) -> tuple[LayerShape, bool]:
    """Widths of an average layer, and whether the formulas describe it."""
    hidden = int(text.hidden_size)
    heads = _number(text, "num_attention_heads")
    known = heads is not None and not any("mamba" in name or "linear_attn" in name for name in vars(text))
    heads = heads or max(hidden // 128, 1)
    key_heads = _number(text, "num_key_value_heads") or heads
    size = _number(text, "head_dim") or hidden // heads
    latent = _number(text, "kv_lora_rank")
    if latent:  # multi-head latent attention: keys and values of all heads are made from a latent vector
        rope = _number(text, "qk_rope_head_dim") or 0
        key_size = (_number(text, "qk_nope_head_dim") or size) + rope
        query, key = heads * key_size, heads * key_size
        value = heads * (_number(text, "v_head_dim") or size)
    else:
        query, key = heads * size, key_heads * size
        value = key
    intermediate = _number(text, "intermediate_size", "ffn_dim", "n_inner")
    known = known and intermediate is not None
    intermediate = intermediate or 4 * hidden
    per_token = _number(text, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 0
    if _expert_count(text) and per_token:
        expert = _number(text, "moe_intermediate_size") or intermediate
        shared = _number(text, "shared_expert_intermediate_size") or (_number(text, "n_shared_experts") or 0) * expert
        routed = per_token * expert + shared
        layers, dense = int(text.num_hidden_layers), _number(text, "first_k_dense_replace") or 0
        intermediate = math.ceil((dense * intermediate + (layers - dense) * routed) / layers)
    else:
        per_token = 0
    return (
        LayerShape(
            hidden=hidden,
            heads=heads,
            query=query,
            key=key,
            value=value,
            attention_output=heads * (value // (heads if latent else key_heads)),
            intermediate=intermediate,
            gated=gated,
            normalized_heads=str(text.model_type).startswith(("qwen3", "gemma3", "olmo2", "olmo3")),
            experts_per_token=per_token,
            key_heads=heads if latent else key_heads,
        ),
        known,
    )


def _cache(text: Any, layer: LayerShape) -> tuple[float, int]:
    """Numbers per token and layer in the key-value cache, and into how many parts it can be split."""
    latent = _number(text, "kv_lora_rank")
    if latent:  # DeepSeek-V2 (2024, arXiv:2405.04434, table 1): the latent vector and the shared rotary key
        return latent + (_number(text, "qk_rope_head_dim") or 0), 1
    return layer.key + layer.value, _number(text, "num_key_value_heads") or layer.heads


def _windows(text: Any) -> tuple[int, int | None]:
    """How many layers attend to a window only, and its tokens."""
    window = _number(text, "sliding_window")
    kinds = getattr(text, "layer_types", None)
    if window is None or getattr(text, "use_sliding_window", True) is False:
        return 0, None
    count = sum(kind == "sliding_attention" for kind in kinds) if kinds else int(text.num_hidden_layers)
    return (count, window) if count else (0, None)
