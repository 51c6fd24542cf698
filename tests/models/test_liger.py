"""Liger's kernels: what is missing is named before a model is loaded; norms, rotary embeddings and MLPs change."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit import PPOModule
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model
from rlhfkit.models.load import require_liger_family

HAS_LIGER = find_spec("liger_kernel") is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_what_is_missing_is_named_before_a_model_is_loaded(load: Callable[..., Any], tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()
    missing = "there is no GPU" + ("" if HAS_LIGER else ", and liger-kernel is not installed (pip install 'rlhfkit[lig")
    with pytest.raises(ImportError, match=re.escape(f"liger_kernels=True cannot be used: {missing}")):
        load(str(folder), loading=ModelLoading(liger_kernels=True))


def test_policy_and_critic_are_loaded_with_what_the_module_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def refuse(model_type: str) -> None:
        asked.append(model_type)
        raise ImportError("refused")

    monkeypatch.setattr("rlhfkit.models.load.require_liger_kernels", refuse)
    module = PPOModule(str(tiny_model(tmp_path)), loading=ModelLoading(liger_kernels=True))
    for build in (module.build_policy, module.critic_part.build):
        with pytest.raises(ImportError, match="refused"):
            build()
    assert asked == ["llama", "llama"]


PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from rlhfkit.models.load import use_liger_kernels
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig
report = {}
for kind in (LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig):
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        config = kind(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                      num_attention_heads=2, num_key_value_heads=1, head_dim=16, pad_token_id=0)
        model = auto.from_config(config)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        source = sys.modules[type(model).__module__]
        rotary = source.apply_rotary_pos_emb
        classes = {name: kind for name, kind in vars(source).items() if isinstance(kind, type)}
        use_liger_kernels(model)
        after, now = model.state_dict(), source.apply_rotary_pos_emb
        heads, angles = torch.randn(2, 1, 2, 5, 16), torch.randn(2, 1, 5, 16)
        report[type(model).__name__] = {
            "layers": sorted({name for layer in model.modules() if "Liger" in (name := layer._get_name())}),
            "rotary on GPUs": now.rlhfkit_liger_kernel.__name__,
            "rotary on CPUs": all(map(torch.equal, now(*heads, *angles), rotary(*heads, *angles))),
            "own classes": all(getattr(source, name) is kind for name, kind in classes.items()),
            "own forward": "forward" not in vars(model),
            "same weights": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
        }
print(json.dumps(report))
"""


@pytest.mark.skipif(not HAS_LIGER, reason="needs the extra liger")
def test_norms_rotary_embeddings_and_mlps_are_ligers_and_the_output_layer_is_not() -> None:
    # In a process of its own: Liger replaces functions and classes of Transformers.
    shown = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout.splitlines()[-1])
    assert len(report) == 8
    for name, found in report.items():
        assert found == {
            "layers": ["LigerRMSNorm", "LigerSwiGLUMLP"],
            "rotary on GPUs": "liger_rotary_pos_emb",
            "rotary on CPUs": True,
            "own classes": True,
            "own forward": True,
            "same weights": True,
        }, name


@pytest.mark.skipif(not HAS_LIGER, reason="needs the extra liger")
def test_a_family_without_kernels_is_an_error_and_not_left_as_it_is() -> None:
    require_liger_family("llama")
    with pytest.raises(ValueError, match=r"Liger has no kernels for models of the type 'gpt2', only for .*llama"):
        require_liger_family("gpt2")
