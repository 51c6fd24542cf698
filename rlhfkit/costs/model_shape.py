"""``ModelShape``: what costs depend on of a model, read from its Transformers configuration without its weights.

Parameters are counted on a model built on PyTorch's ``meta`` device, which holds no data, so the count is exact for
every family that Transformers knows (a trillion parameters take half a second). The widths of a layer, from which
activations, keys and values are computed, come from the configuration's standard names.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from rlhfkit.models.attention.families import sees_images
from rlhfkit.models.load import Quantization, context_length, empty_model, existing_name, load_config
from rlhfkit.models.lora import LoRA, adapter_base, adapter_size, saved_adapter_size, vision_parameters


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
    context: int | None = None
    adapters: int = 0
    """Parameters of LoRA's matrices; 0: none."""
    frozen: int = 0
    """Parameters of a vision part that stays as it is."""
    quantized: int = 0
    """Numbers in matrices that are held in 4 bits (QLoRA)."""
    fused_head: bool = True
    """Whether log-probs are computed from the output layer without logits (:func:`~rlhfkit.losses.linear_logprobs`)."""
    usual: bool = True
    """Whether the formulas describe its layers; not recurrent ones, or widths that the configuration lacks."""

    @property
    def trained(self) -> int:
        """Parameters that get a gradient."""
        return self.adapters or self.parameters - self.frozen

    @property
    def tied(self) -> bool:
        """Whether the token embeddings are the output layer."""
        return not self.head and self.vocabulary > 1

    def on_rank(self, tensor: int) -> float:
        """Parameters on each of so many tensor ranks; embeddings and output layer are whole on all."""
        divided = self.parameters - self.embedding - self.head
        return self.parameters - divided * (1 - 1 / tensor)

    def trained_on_rank(self, tensor: int) -> float:
        """The same of trained parameters; adapters count as whole on all, a little too much."""
        return float(self.adapters) or self.on_rank(tensor) - self.frozen

    def with_scalar_head(self) -> "ModelShape":
        """The shape of a critic or reward model made of this one: one number per token in place of the logits."""
        if self.vocabulary == 1:
            return self
        active = self.active - (self.head or self.embedding) + self.layer.hidden
        parameters = self.parameters - self.head + self.layer.hidden
        return replace(self, parameters=parameters, active=active, head=0, vocabulary=1)


def model_shape(
    model: str | Any,
    *,
    lora: LoRA | None = None,
    quantization: Quantization | None = None,
    train_vision: bool = True,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Describe a model.

    Args:
        model: Folder or hub name, or a Transformers configuration. A folder with an adapter: its base model and it.
        lora: Adapters that are trained in place of its weights.
        quantization: Format of the frozen weights.
        train_vision: Whether the vision part of a model that sees images is trained.
        trust_remote_code: Run Python code that comes with the model.

    Raises:
        ValueError: If the configuration lacks the number of layers, the hidden size or the vocabulary, or the adapters'
            targets are no layers of the model.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    name = model if isinstance(model, str) else type(model).__name__
    config = load_config(model, trust_remote_code=trust_remote_code) if isinstance(model, str) else model
    text = config.get_text_config()
    missing = [field for field in ("num_hidden_layers", "hidden_size", "vocab_size") if _number(text, field) is None]
    if missing:
        raise ValueError(
            f"the configuration of {name} (model_type {text.model_type!r}) does not say its {', '.join(missing)}, on "
            "which the estimate depends"
        )
    network = empty_model(config, trust_remote_code=trust_remote_code)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}  # tied weights once
    output = network.get_output_embeddings()
    embedding = network.get_input_embeddings().weight
    tied = output is None or output.weight is embedding
    head, total = (0 if tied else output.weight.numel()), sum(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name and "shared" not in name)
    layer, usual = _layer(text, gated=any("gate_proj" in name or "gate_up" in name for name in sizes))
    layers = int(text.num_hidden_layers)
    chosen = experts * layer.experts_per_token / max(_expert_count(text), 1)
    rest = total - embedding.numel() - head - experts
    adapters = adapter_size(network, lora) if lora is not None else 0
    if isinstance(model, str) and adapter_base(existing_name(model)) is not None:
        adapters = saved_adapter_size(existing_name(model))
    frozen = 0
    if sees_images(config) and not train_vision:
        frozen = sum(parameter.numel() for _, parameter in vision_parameters(network))
    quantized = 0
    if quantization is not None:  # Transformers leaves the output layer as it is, and experts in one tensor
        linear = (one for one in network.modules() if isinstance(one, nn.Linear | Conv1D) and one is not output)
        quantized = sum(one.weight.numel() for one in linear)
    # DeepSeek-V2 (2024, arXiv:2405.04434, table 1) caches the latent vector and the shared rotary key.
    latent = _number(text, "kv_lora_rank")
    cached = latent + (_number(text, "qk_rope_head_dim") or 0) if latent else layer.key + layer.value
    windowed, window = _windows(text)
    return ModelShape(
        family=str(text.model_type),
        parameters=total,
        embedding=embedding.numel(),
        head=head,
        experts=experts,
        active=round(rest + chosen + (head or embedding.numel())),
        layers=layers,
        vocabulary=int(text.vocab_size),
        layer=layer,
        cached=cached * layers,
        cache_heads=1 if latent else _number(text, "num_key_value_heads") or layer.heads,
        window=window,
        windowed_layers=windowed,
        context=context_length(config),
        adapters=adapters,
        frozen=frozen,
        quantized=quantized,
        usual=usual,
    )


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
    usual = heads is not None and not any("mamba" in name or "linear_attn" in name for name in vars(text))
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
    usual = usual and intermediate is not None
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
        ),
        usual,
    )


def _windows(text: Any) -> tuple[int, int | None]:
    """How many layers attend to a window only, and its tokens."""
    window = _number(text, "sliding_window")
    kinds = getattr(text, "layer_types", None)
    if window is None or getattr(text, "use_sliding_window", True) is False:
        return 0, None
    count = sum(kind == "sliding_attention" for kind in kinds) if kinds else int(text.num_hidden_layers)
    return (count, window) if count else (0, None)
