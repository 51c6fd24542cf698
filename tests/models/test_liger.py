"""Liger's kernels: what is missing is named before a model is loaded; norms, rotary embeddings and MLPs change."""

import itertools
import re
import sys
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import transformers as hf
from tiny_models import tiny_model

from rlhfkit import PPOModule
from rlhfkit.models import ModelLoading
from rlhfkit.models.load import require_liger_family, use_liger_kernels

CONFIGS = (hf.LlamaConfig, hf.Qwen2Config, hf.Qwen3Config, hf.MistralConfig)
HAS_LIGER = find_spec("liger_kernel") is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_what_is_missing_is_named_before_policy_or_critic_is_loaded(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    module = PPOModule(str(folder), loading=ModelLoading(liger_kernels=True))
    missing = "there is no GPU" + ("" if HAS_LIGER else ", and liger-kernel is not installed (pip install 'rlhfkit[lig")
    for build in (module.build_policy, module.critic_part.build):
        with pytest.raises(ImportError, match=re.escape(f"liger_kernels=True cannot be used: {missing}")):
            build()


def check_layers() -> None:
    """Of language models and classifiers of four families."""
    for kind, auto in itertools.product(CONFIGS, (hf.AutoModelForCausalLM, hf.AutoModelForSequenceClassification)):
        sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
        config = kind(**sizes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0)
        model = auto.from_config(config)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        source = sys.modules[type(model).__module__]
        rotary = source.apply_rotary_pos_emb
        classes = {name: kind for name, kind in vars(source).items() if isinstance(kind, type)}
        use_liger_kernels(model)
        after, now = model.state_dict(), source.apply_rotary_pos_emb
        layers = {name for layer in model.modules() if "Liger" in (name := layer._get_name())}
        assert layers == {"LigerRMSNorm", "LigerSwiGLUMLP"}
        assert now.rlhfkit_liger_kernel.__name__ == "liger_rotary_pos_emb"  # on GPUs
        heads, angles = torch.randn(2, 1, 2, 5, 16), torch.randn(2, 1, 5, 16)
        assert all(map(torch.equal, now(*heads, *angles), rotary(*heads, *angles)))
        assert all(getattr(source, name) is kind for name, kind in classes.items())
        assert "forward" not in vars(model)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.skipif(not HAS_LIGER, reason="needs the extra liger")
def test_norms_rotary_embeddings_and_mlps_are_ligers_and_the_output_layer_is_not() -> None:
    # In a process of its own: Liger replaces functions and classes of Transformers.
    process = get_context("spawn").Process(target=check_layers)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.skipif(not HAS_LIGER, reason="needs the extra liger")
def test_a_family_without_kernels_is_an_error_and_not_left_as_it_is() -> None:
    require_liger_family("llama")
    with pytest.raises(ValueError, match=r"Liger has no kernels for models of the type 'gpt2', only for .*llama"):
        require_liger_family("gpt2")
