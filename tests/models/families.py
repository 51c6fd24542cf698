"""Model families: for each a tiny random model with its tokenizer, in a folder that Transformers and vLLM can load.

The table says what each family is expected to do with us; ``tests/models/test_families.py`` holds it to that, and
``docs/generate_families.py`` makes a page of it.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY, HIDDEN, CONTEXT = 128, 64, 128

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
# Heads of 32: vLLM's CPU attention has no smaller ones. Policies switch off the dropout.
COMMON: dict[str, Any] = TOKENS | {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2}
COMMON |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "attention_dropout": 0.1}
COMMON |= {"max_position_embeddings": CONTEXT}
GPT2: dict[str, Any] = TOKENS | {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
ALTERNATING: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FALCON = {name: value for name, value in COMMON.items() if name != "head_dim"}
GEMMA3_TOWER = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
GEMMA3_WITH_TOWER: dict[str, Any] = {
    "text_config": COMMON | ALTERNATING | {"query_pre_attn_scalar": 32},
    "vision_config": GEMMA3_TOWER | {"hidden_size": 32, "intermediate_size": 32},
    "mm_tokens_per_image": 4,
    "image_token_index": 100,
    "boi_token_index": 101,
    "eoi_token_index": 102,
}
BLOOM = TOKENS | {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 2}
MPT = TOKENS | {"d_model": HIDDEN, "n_heads": 2, "n_layers": 2, "max_seq_len": CONTEXT, "expansion_ratio": 2}
GPT_NEO = TOKENS | {"hidden_size": HIDDEN, "num_layers": 2, "num_heads": 2, "max_position_embeddings": CONTEXT}
GPT_NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
XGLM = TOKENS | {"d_model": HIDDEN, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2}
XLSTM = TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 8, "mode": "inference"}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32)
MLA |= {"num_key_value_heads": 2, "head_dim": 32}
DEEPSEEK_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
DEEPSEEK_MOE |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2}
MAMBA2 |= {"mamba_chunk_size": 8, "mamba_n_groups": 1}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
LINEAR |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A family and what is expected of it."""

    name: str
    """As people call it."""
    model_type: str
    """Transformers' name."""
    config: dict[str, Any] = field(default_factory=dict)
    """What its configuration has beside or instead of :data:`COMMON`."""
    packed: bool = True
    """Whether it runs packed, and with that shares prompts."""
    notes: str = ""
    """For the page."""
    base: dict[str, Any] = field(default_factory=lambda: COMMON)
    """In place of :data:`COMMON`, for families with names of their own."""
    reference: str = "eager"
    """Transformers' attention that is compared with."""

    def save(self, folder: Path, *, seed: int = 0) -> Path:
        """Write a random model in float32 and its tokenizer."""
        config = AutoConfig.for_model(self.model_type, **{**self.base, **self.config})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            randomize(model)
        model.save_pretrained(folder)
        tokenizer = tiny_tokenizer()
        tokenizer.model_max_length = CONTEXT
        tokenizer.save_pretrained(folder)
        return folder


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Weights with which a random model has preferences, and none that is zero or one and would not show."""
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    saved = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in saved and name.endswith("e_score_correction_bias"):  # of routers, trained by other means
            buffer.copy_(0.2 * torch.randn_like(buffer))


def alone(model: Any, ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(T-1,) log-probs of a sequence's tokens but the first, and entropies before them, from a model's own logits."""
    dense = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
    return dense.gather(-1, ids[1:, None])[:, 0], -(dense.exp() * dense).sum(-1)


def family(
    name: str, model_type: str, *parts: dict[str, Any], packed: bool = True, notes: str = "", **more: Any
) -> Family:
    """An entry of the table: ``base`` and ``reference`` are the entry's, other keywords its configuration's."""
    own = {key: more.pop(key) for key in ("base", "reference") if key in more}
    merged: dict[str, Any] = {}
    for part in (*parts, more):
        merged |= part
    return Family(name, model_type, merged, packed, notes, **own)


INTERFACE = "no attention interface in Transformers"
UNHEARD = "keyword arguments do not reach its attention"
RECURRENT = "recurrent layers"

FAMILIES: tuple[Family, ...] = (
    family("AFMoE (Arcee)", "afmoe", MOE, num_dense_layers=1, sliding_window=4, global_attn_every_n_layers=2),
    family("Apertus", "apertus"),
    family("Arcee", "arcee"),
    family("Bamba", "bamba", MAMBA2, attn_layer_indices=[1], packed=False, notes=RECURRENT),
    family("BitNet", "bitnet"),
    family("BLOOM", "bloom", base=BLOOM, packed=False, notes=INTERFACE + "; ALiBi"),
    family("CodeGen", "codegen", base=GPT2 | {"n_head": 4, "n_embd": 128, "rotary_dim": 16}, packed=False,
        notes=INTERFACE),
    family("Cohere", "cohere", logit_scale=0.5),
    family("Cohere 2", "cohere2", ALTERNATING, logit_scale=0.5),
    family("CWM", "cwm", ALTERNATING),
    family("Cohere 2 MoE", "cohere2_moe", ALTERNATING, MOE, logit_scale=0.5),
    family("DeepSeek V2", "deepseek_v2", MLA, DEEPSEEK_MOE, topk_method="greedy", notes="multi-head latent attention"),
    family("DeepSeek V3", "deepseek_v3", MLA, DEEPSEEK_MOE, notes="multi-head latent attention"),
    family("dots.llm1", "dots1", DEEPSEEK_MOE, sliding_window=4, layer_types=["full_attention", "sliding_attention"]),
    family("ERNIE 4.5", "ernie4_5"),
    family("ERNIE 4.5 MoE", "ernie4_5_moe", MOE, moe_num_experts=4, moe_k=2, moe_layer_start_index=1,
        moe_num_shared_experts=1),
    family("EXAONE 4", "exaone4", ALTERNATING),
    family("EXAONE MoE", "exaone_moe", ALTERNATING, MOE, DEEPSEEK_MOE),
    family("Falcon", "falcon", base=FALCON, num_kv_heads=1, alibi=False, packed=False, notes=INTERFACE),
    family("Falcon (ALiBi)", "falcon", base=FALCON, num_kv_heads=2, alibi=True, new_decoder_architecture=False,
        multi_query=False, reference="sdpa", packed=False,
        notes=INTERFACE + "; ALiBi, which `eager` adds twice in Transformers 5.19"),
    family("Falcon-H1", "falcon_h1", MAMBA2, lm_head_multiplier=0.5, mamba_d_ssm=128, packed=False, notes=RECURRENT),
    family("FlexOlmo", "flex_olmo", MOE),
    family("Gemma", "gemma"),
    family("Gemma 2", "gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0, sliding_window=4,
        query_pre_attn_scalar=32, packed=False, notes="soft-capped attention, run with `eager`"),
    family("Gemma 3", "gemma3_text", ALTERNATING, query_pre_attn_scalar=32),
    family("Gemma 3 with its vision tower", "gemma3", base=GEMMA3_WITH_TOWER, packed=False,
        notes='tokens of an image see later ones of it; packed for texts alone with `attention="buckets"`'),
    family("Gemma 3n", "gemma3n_text", num_hidden_layers=4, intermediate_size=[64] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2, sliding_window=4,
        vocab_size_per_layer_input=VOCABULARY, hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4),
    family("Gemma 4", "gemma4_text", ALTERNATING, num_hidden_layers=2, vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16),
    family("GLM 4 (GLM)", "glm"),
    family("GLM 4-0414", "glm4"),
    family("GLM 4.5 MoE", "glm4_moe", DEEPSEEK_MOE),
    family("GLM 4 MoE Lite", "glm4_moe_lite", MLA, DEEPSEEK_MOE),
    family("GPT-2", "gpt2", base=GPT2),
    family("GPT BigCode (StarCoder)", "gpt_bigcode", base=GPT2),
    family("GPT-J", "gptj", base=GPT2 | {"rotary_dim": 16}, packed=False, notes=INTERFACE),
    family("GPT-Neo", "gpt_neo", base=GPT_NEO, packed=False, notes=INTERFACE),
    family("GPT-NeoX (Pythia)", "gpt_neox"),
    family("GPT-NeoX-Japanese", "gpt_neox_japanese", intermediate_multiple_size=2, packed=False, notes=INTERFACE),
    family("gpt-oss", "gpt_oss", ALTERNATING, MOE, packed=False, notes="learned attention sinks"),
    family("Granite", "granite", logits_scaling=2.0, attention_multiplier=0.3, residual_multiplier=0.7,
        embedding_multiplier=3.0),
    family("Granite MoE", "granitemoe", MOE, logits_scaling=2.0),
    family("Granite MoE shared", "granitemoeshared", MOE, logits_scaling=2.0, shared_intermediate_size=32),
    family("Granite 4 hybrid", "granitemoehybrid", MOE, MAMBA2, layer_types=["mamba", "attention"],
        shared_intermediate_size=32, packed=False, notes=RECURRENT),
    family("Helium", "helium"),
    family("HyperCLOVA X", "hyperclovax", logits_scaling=2.0),
    family("HunYuan dense", "hunyuan_v1_dense"),
    family("HunYuan MoE", "hunyuan_v1_moe", MOE, moe_topk=2),
    family("Jamba", "jamba", MOE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8, use_mamba_kernels=False, packed=False,
        notes=RECURRENT),
    family("Jais 2", "jais2"),
    family("JetMoE", "jetmoe", MOE, kv_channels=32, num_key_value_heads=2),
    family("LFM2", "lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, packed=False,
        notes="short convolutions"),
    family("Llama", "llama"),
    family("Llama 4 (text)", "llama4_text", MOE, attention_chunk_size=4, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"], interleave_moe_layer_step=1, intermediate_size_mlp=64,
        floor_scale=4, packed=False, notes="chunks, and positions counted over the row"),
    family("LongCat Flash", "longcat_flash", MLA, num_layers=1, n_routed_experts=4, zero_expert_num=2, moe_topk=2,
        ffn_hidden_size=64, expert_ffn_hidden_size=32, notes="multi-head latent attention"),
    family("Mamba", "mamba", state_size=8, time_step_rank=8, use_mambapy=False, packed=False, notes=RECURRENT),
    family("Mamba 2", "mamba2", num_heads=4, state_size=16, n_groups=1, chunk_size=8, packed=False, notes=RECURRENT),
    family("MiniCPM 3", "minicpm3", MLA, notes="multi-head latent attention"),
    family("MiniMax", "minimax", MOE, layer_types=["linear_attention", "full_attention"], block_size=4, packed=False,
        notes=RECURRENT),
    family("MiniMax M2", "minimax_m2", MOE),
    family("Ministral", "ministral", ALTERNATING),
    family("Ministral 3", "ministral3"),
    family("Mistral", "mistral", sliding_window=4),
    family("Mixtral", "mixtral", MOE),
    family("ModernBERT decoder", "modernbert-decoder", local_attention=4, global_attn_every_n_layers=2),
    family("Moshi (text)", "moshi", ffn_dim=64, packed=False, notes=UNHEARD),
    family("MPT", "mpt", base=MPT, packed=False, notes=INTERFACE + "; ALiBi"),
    family("nanochat", "nanochat"),
    family("Nemotron", "nemotron", packed=False, notes=UNHEARD),
    family("Nemotron-H", "nemotron_h", layers_block_type=["mamba", "attention", "mlp"], num_hidden_layers=3,
        mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=1, chunk_size=8, use_mamba_kernels=False,
        packed=False, notes=RECURRENT),
    family("OLMo", "olmo"),
    family("OLMo 2", "olmo2"),
    family("OLMo 3", "olmo3", ALTERNATING),
    family("OLMoE", "olmoe", MOE),
    family("OPT", "opt", ffn_dim=64, word_embed_proj_dim=HIDDEN),
    family("Persimmon", "persimmon"),
    family("Phi", "phi"),
    family("Phi 3", "phi3"),
    family("Phi-MoE", "phimoe", MOE),
    family("Qwen 2", "qwen2"),
    family("Qwen 2 MoE", "qwen2_moe", MOE, shared_expert_intermediate_size=32),
    family("Qwen 3", "qwen3"),
    family("Qwen 3 MoE", "qwen3_moe", MOE),
    family("Qwen 3-Next", "qwen3_next", MOE, LINEAR, shared_expert_intermediate_size=32, packed=False, notes=RECURRENT),
    family("Qwen 3.5", "qwen3_5_text", LINEAR, packed=False, notes=RECURRENT),
    family("Qwen 3.5 MoE", "qwen3_5_moe_text", MOE, LINEAR, shared_expert_intermediate_size=32, packed=False,
        notes=RECURRENT),
    family("RecurrentGemma", "recurrent_gemma", num_hidden_layers=3, lru_width=HIDDEN, attention_window_size=8,
        block_types=["recurrent", "recurrent", "attention"], logits_soft_cap=3.0, packed=False, notes=RECURRENT),
    family("RWKV 4", "rwkv", attention_hidden_size=HIDDEN, context_length=CONTEXT, packed=False, notes=RECURRENT),
    family("Seed-OSS", "seed_oss"),
    family("SmolLM 3", "smollm3", no_rope_layers=[1, 0]),
    family("Solar Open", "solar_open", DEEPSEEK_MOE),
    family("StableLM", "stablelm", packed=False, notes=INTERFACE),
    family("StarCoder 2", "starcoder2", sliding_window=4),
    family("XGLM", "xglm", base=XGLM, max_position_embeddings=CONTEXT, packed=False, notes=INTERFACE),
    family("xLSTM", "xlstm", base=XLSTM, packed=False, notes=RECURRENT),
    family("Youtu", "youtu", MLA),
    family("Zamba 2", "zamba2", MAMBA2, num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"],
        attention_hidden_size=128, attention_head_dim=64, n_mamba_heads=4, mamba_headdim=32, mamba_ngroups=1,
        num_mem_blocks=1, use_mem_rope=True, hybrid_layer_ids=[1], packed=False, notes=RECURRENT),
)  # fmt: skip
"""All of them, in the order of their names."""
