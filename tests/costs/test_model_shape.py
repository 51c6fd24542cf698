"""Shapes of models: counts against real models and published numbers."""

import math
from pathlib import Path

import pytest
from models.vision_families import save_vision_model
from transformers import DeepseekV3Config, GPT2Config, MambaConfig, MixtralConfig, PreTrainedConfig

from rlhfkit.costs.model_shape import ModelShape, model_shape
from rlhfkit.models import LoRA, ModelLoading, load_causal_lm
from rlhfkit.models.lora import add_lora

from .shapes import CONFIGS, SIZES, build, llama_70b

TWO = ("q_proj", "v_proj")


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    shape, model = model_shape(CONFIGS[name]), build(CONFIGS[name])
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.embedding == model.get_input_embeddings().weight.numel()
    assert shape.tied == (name == "tied llama")
    assert shape.head == (0 if shape.tied else model.get_output_embeddings().weight.numel())


@pytest.mark.parametrize("seeing", [True, False])
def test_the_vision_part_is_trained_or_not(seeing: bool, tmp_path: Path) -> None:
    folder = str(save_vision_model("qwen3_vl", tmp_path))
    model = load_causal_lm(folder, loading=ModelLoading(train_vision=seeing))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    shape = model_shape(folder, train_vision=seeing)
    assert shape.parameters == sum(size for size, _ in sizes)
    assert shape.trained == shape.trained_on_rank(1) == sum(size for size, trained in sizes if trained)


@pytest.mark.parametrize(
    ("shape", "total", "active", "cached", "heads"),
    [
        (llama_70b(), 70.6e9, None, 320 * 1024 / 2, 8),  # 320 KiB of keys and values per token in bfloat16
        (model_shape(MixtralConfig()), 46.7e9, 12.9e9, 32 * 2 * 8 * 128, 8),
        (model_shape(DeepseekV3Config()), 671e9, 37e9, 61 * (512 + 64), 1),  # the latent vector
    ],
)
def test_published_models_have_their_published_sizes(
    shape: ModelShape, total: float, active: float | None, cached: int, heads: int
) -> None:
    assert shape.parameters == pytest.approx(total, rel=0.002)
    assert shape.active == pytest.approx(active or total, rel=0.02)  # papers count the embedding, or not
    assert (shape.cached, shape.cache_heads) == (cached, heads)


@pytest.mark.parametrize(
    ("config", "lora"),
    [
        *((CONFIGS[name], LoRA(rank=4, targets=to)) for name in ("llama", "mixtral") for to in ("all-linear", TWO)),
        (CONFIGS["llama"], LoRA(rank=4, dora=True)),
        (GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4), LoRA(rank=4, targets=("attn.c_attn",))),
    ],
)
def test_adapters_are_counted_as_peft_makes_them(config: PreTrainedConfig, lora: LoRA) -> None:
    model = build(config)
    add_lora(model, lora, base="base")
    real = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shape = model_shape(config, lora=lora)
    assert shape.adapters == shape.trained == real


def test_matrices_of_4_bits_are_those_that_bitsandbytes_makes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra qlora is not installed")
    build(CONFIGS["llama"]).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), lora=LoRA(rank=4), loading=ModelLoading(quantization="nf4"))
    weights = [one for _, one in model.named_parameters() if hasattr(one, "quant_state")]
    shape = model_shape(CONFIGS["llama"], lora=LoRA(rank=4), quantization="nf4")
    assert shape.quantized == sum(math.prod(one.quant_state.shape) for one in weights) > 0


def test_layers_with_a_window_are_counted_and_those_without_attention_not_described() -> None:
    assert model_shape(MixtralConfig(**SIZES, sliding_window=64)).windowed_layers == 2
    plain = model_shape(CONFIGS["llama"])
    assert (plain.windowed_layers, plain.usual) == (0, True)
    assert not model_shape(MambaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)).usual


def test_what_has_no_sizes_says_what_is_missing() -> None:
    lacking = "num_hidden_layers, hidden_size, vocab_size"
    with pytest.raises(ValueError, match=rf"PreTrainedConfig .* {lacking}"):
        model_shape(PreTrainedConfig())
    with pytest.raises(FileNotFoundError, match="no model folder"):
        model_shape("./nothing/here")
