"""Which families can be packed, and what happens to the others."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, LlamaConfig

from models.families import FAMILIES as TESTED
from models.test_forward import experience
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model, policy_output, scalar_output
from rlhfkit.models.attention.families import KNOWN, PACKED, _warn_once, exact_attention, packing_problem
from rlhfkit.models.attention.packed import PACKED_ATTENTION
from rlhfkit.strategies.deepspeed.zero3 import hugging_face_sharding


def meta(config: Any) -> Any:
    """A model of full size without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_the_table_is_the_one_that_is_tested() -> None:
    tested = {family.model_type: family for family in TESTED if family.name != "Falcon (ALiBi)"}
    towers = {"gemma3"}  # their text part is a family of its own
    assert tested.keys() - towers == KNOWN
    assert {kind for kind, family in tested.items() if family.packed} - towers == PACKED - {"gemma2"}


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gemma2", "soft cap"),
        ("gpt_oss", "learned sinks"),
        ("llama4_text", "layers of chunked_attention"),
        ("recurrent_gemma", "recurrent layers"),
        ("granitemoehybrid", "layers of linear_attention"),
        ("moshi", "keyword arguments do not reach its attention"),
        ("diffllama", "not among those that are tested with packed rows. attention='buckets' packs it"),
        ("bloom", "does not go through Transformers' attention interface"),
        ("mamba", "does not go through Transformers' attention interface"),
    ],
)
def test_what_would_be_wrong_is_not_packed_and_the_reason_is_named(model_type: str, why: str) -> None:
    config = AutoConfig.for_model(model_type)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = config
    assert why in str(packing_problem(model))


def test_a_soft_cap_that_a_random_copy_does_not_reach_is_not_left_out() -> None:
    """Scores of heads of 16 and 32 numbers are far below the cap of 50 in a random copy, not in a trained model."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    for size in (16, 32):
        gemma = meta(Gemma2Config(**shape, head_dim=size, query_pre_attn_scalar=256))
        assert "soft cap (50)" in str(packing_problem(gemma))
        assert exact_attention(gemma) == "eager"
        uncapped = Gemma2Config(**shape, head_dim=size, query_pre_attn_scalar=256, attn_logit_softcapping=None)
        assert packing_problem(meta(uncapped)) is None
    assert exact_attention(meta(LlamaConfig(num_hidden_layers=2))) is None


def test_attention_that_would_leave_out_a_soft_cap_is_refused(tmp_path: Path) -> None:
    """Transformers takes ``sdpa`` for Gemma 2 if it is asked for, and computes it without the cap."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma2Config(**shape, num_key_value_heads=1, head_dim=16, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for load in (load_causal_lm, load_scalar_model):
        with pytest.raises(ValueError, match=r"attention='sdpa' would be wrong.*soft cap \(50\).*take 'eager'"):
            load(str(tmp_path), loading=ModelLoading(attention="sdpa"))
    assert load_causal_lm(str(tmp_path), loading=ModelLoading(attention="eager")).config._attn_implementation == "eager"


def test_an_unpacked_model_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = AutoConfig.for_model("bloom", vocab_size=128, hidden_size=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    _warn_once.cache_clear()  # another test may have loaded one
    with caplog.at_level(logging.WARNING, logger="rlhfkit"):
        for _ in range(2):
            load_causal_lm(str(tmp_path))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["BloomForCausalLM is not packed"]


def test_a_packed_row_that_no_layer_has_read_is_an_error(tmp_path: Path) -> None:
    folder, batch = str(tiny_model(tmp_path)), experience([(3, 5), (2, 2)])
    policy, critic = load_causal_lm(folder), load_scalar_model(folder)
    for model in (policy, critic.model):
        assert model.config._attn_implementation == PACKED_ATTENTION
        model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "packed_layout": None}), with_kwargs=True
        )
    with pytest.raises(RuntimeError, match="no attention layer of LlamaForCausalLM has read"):
        policy_output(policy, batch, batch.action_mask)
    with pytest.raises(RuntimeError, match="no attention layer of LlamaForSequenceClassification has read"):
        scalar_output(critic, batch)


def test_a_classifier_is_packed_where_models_are_built_sharded() -> None:
    """Transformers fills a classifier's weights while it is made then, of the copy on "meta" too."""
    import deepspeed.runtime.zero.partition_parameters  # noqa: F401  (as in a run at ZeRO stage 3)
    from transformers import LlamaForSequenceClassification
    from transformers.integrations import is_deepspeed_zero3_enabled

    config = LlamaConfig(
        vocab_size=91, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    model = LlamaForSequenceClassification(config)
    with hugging_face_sharding({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
        assert packing_problem(model) is None
        assert is_deepspeed_zero3_enabled()


def test_models_are_built_whole_where_accelerate_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it Transformers builds no sharded models; engines shard them later."""
    from importlib.metadata import PackageNotFoundError

    import transformers.integrations.deepspeed as integration

    def missing(package: str, hint: str | None = None) -> None:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(integration, "dep_version_check", missing)
    with hugging_face_sharding({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}):
        assert not integration.is_deepspeed_zero3_enabled()
    assert "engines shard later, as a package is missing: No package metadata was found for accelerate" in caplog.text
