"""Options of loading: names of attention, switches, and weights in 4 bits."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import MambaConfig, MambaForCausalLM

from models.test_forward import experience
from rlhfkit import SFTModule
from rlhfkit.models import LoRA, ModelLoading, load_causal_lm, policy_output
from rlhfkit.models.forward import packs_batches
from rlhfkit.models.load import choose_attention
from rlhfkit.rollout import ModuleWeights


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize(
    ("attention", "missing"),
    [
        ("flash_attention_2", "there is no GPU, and flash-attn is not installed: pip install 'rlhfkit[flash]'"),
        ("flash_attention_3", "there is no GPU, and flash-attn 3 is not installed: build it from the folder hopper"),
        ("varlen", "there is no GPU"),
    ],
)
def test_attention_that_cannot_run_is_refused_before_transformers_does(
    tmp_path: Path, attention: str, missing: str
) -> None:
    with pytest.raises(ImportError, match=re.escape(missing) + ".*attention='auto'"):
        load_causal_lm(str(tiny_model(tmp_path)), loading=ModelLoading(attention=attention))


def test_an_unknown_attention_is_refused_when_a_module_is_made_and_when_a_model_is_loaded(tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path))
    for make in (load_causal_lm, SFTModule):
        with pytest.raises(ValueError, match=r"attention must be None, one of auto, varlen, .*, got 'flash'"):
            make(folder, loading=ModelLoading(attention="flash"))


def test_flash_attention_packs_the_families_that_can_be_and_leaves_the_others_as_they_were_loaded(
    tmp_path: Path,
) -> None:
    """What :func:`load_causal_lm` does once Transformers has loaded a model with flash attention, which needs a GPU."""
    packed: Any = load_causal_lm(str(tiny_model(tmp_path)), loading=ModelLoading(attention="sdpa"))
    recurrent: Any = MambaForCausalLM(MambaConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1))
    for model, name in ((packed, "rlhfkit_packed_fa2"), (recurrent, "flash_attention_2")):
        model.config._attn_implementation_internal = "flash_attention_2"
        choose_attention(model, "flash_attention_2")
        assert model.config._attn_implementation == name
        assert packs_batches(model) == (model is packed)
    with pytest.raises(ValueError, match="attention='buckets' would be wrong for MambaForCausalLM"):
        choose_attention(recurrent, "buckets")
    buckets = load_causal_lm(str(tmp_path), loading=ModelLoading(attention="buckets"))
    assert packs_batches(buckets)


def test_a_forward_pass_in_eval_mode_changes_neither_weights_nor_training(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="4 bits are bitsandbytes' (extra qlora)")
    model = load_causal_lm(str(tiny_model(tmp_path)), lora=LoRA(rank=2), loading=ModelLoading(quantization="nf4"))
    batch, merged, logprobs, gradients = experience([(3, 5), (7, 1), (1, 9)]), [], [], []
    for _ in range(2):
        out = policy_output(model.train(), batch, batch.action_mask).logprobs
        model.zero_grad()
        out.sum().backward()
        logprobs.append(out.detach())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        merged.append({name: tensor.clone() for name, tensor in ModuleWeights(model)})
        with torch.no_grad():
            evaluated = policy_output(model.eval(), batch, batch.action_mask).logprobs
        torch.testing.assert_close(evaluated, logprobs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(*logprobs, rtol=0, atol=0)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    torch.testing.assert_close(*merged, rtol=0, atol=0)


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(ModelLoading) if each.default is False])
def test_a_text_is_no_switch_of_loading(name: str) -> None:
    """Not even "false", which would count as true: ``trust_remote_code`` runs code."""
    with pytest.raises((TypeError, ValueError), match=f"{name} must be .*, got 'false'"):
        ModelLoading(**{name: "false"})
