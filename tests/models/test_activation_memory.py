"""Tiled MLPs give the same numbers; in less memory: ``tests/costs/test_measured.py``.

Offloading is tested in ``tests/simulated_device/test_device.py``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.conftest import Folders
from rlhfkit import LoRA, SFTModule
from rlhfkit.models import ModelLoading, load_causal_lm, load_scalar_model
from rlhfkit.models.load import disable_dropout

DENSE = ["llama", "gemma3_text", "gpt2", "gpt_neox", "phi3", "qwen3", "qwen2_moe"]
IDS = torch.arange(2, 36).view(2, 17)


def train(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs and gradients of one pass without dropout; of a loss that weighs tokens differently."""
    disable_dropout(model)
    output = model(input_ids=IDS, use_cache=False)
    logprobs = output.logits.float().log_softmax(-1)[..., 5]
    (logprobs * torch.linspace(-1, 1, IDS.numel()).view_as(logprobs)).sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_equal(first: Any, second: Any) -> None:
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=2e-5)
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        torch.testing.assert_close(second[1][name], gradient, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", DENSE)
def test_tiles_of_any_size_change_nothing_but_rounding(folders: Folders, name: str) -> None:
    plain = train(load_causal_lm(folders[name]))
    for tokens, options in ((5, {}), (True, {}), (1, {"gradient_checkpointing": True})):
        check_equal(plain, train(load_causal_lm(folders[name], loading=ModelLoading(tiled_mlp=tokens, **options))))


def test_tiles_work_with_adapters_and_heads_of_scalars(folders: Folders) -> None:
    torch.manual_seed(0)
    plain = load_causal_lm(folders["llama"], lora=LoRA(rank=2))
    torch.manual_seed(0)
    tiled = load_causal_lm(folders["llama"], lora=LoRA(rank=2), loading=ModelLoading(tiled_mlp=4))
    check_equal(train(plain), train(tiled))
    critic = load_scalar_model(folders["llama"], head_std=0.0, loading=ModelLoading(tiled_mlp=4))
    assert sum("forward" in vars(module) for module in critic.modules()) == 2


def test_dropout_inside_a_tile_is_the_same_when_it_is_recomputed(folders: Folders) -> None:
    model = load_causal_lm(folders["gpt2"], loading=ModelLoading(tiled_mlp=5))  # drops a tenth in its MLP
    mlp = model.transformer.h[0].mlp
    hidden = torch.randn(1, 12, 64, requires_grad=True)
    torch.manual_seed(3)
    out = mlp(hidden)
    kept = (out != 0).float()
    # The last layer's bias gradient counts the elements that were kept, by 1 / (1 - p).
    (gradient,) = torch.autograd.grad(out.sum(), mlp.c_proj.bias)
    torch.testing.assert_close(gradient, kept.sum((0, 1)) / 0.9)


def test_mixtures_of_experts_and_bad_arguments_are_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="MixtralForCausalLM has no dense MLP"):
        load_causal_lm(folders["mixtral"], loading=ModelLoading(tiled_mlp=True))
    with pytest.raises(ValueError, match="set both, or neither"):
        SFTModule(folders["llama"], loading=ModelLoading(offload_activations=True))
