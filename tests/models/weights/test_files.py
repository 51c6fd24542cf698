"""Weights as ``save_pretrained`` writes them, against what it writes. Covers merging.py, with test_lora.py."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models.families import FAMILIES, Family
from rlhfkit.models import LoRA, load_causal_lm
from rlhfkit.models.weights.merging import merged_weights
from rlhfkit.rollout import ModuleWeights

BY_NAME = {family.name: family for family in FAMILIES}


def yielded(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What an engine is sent, checked against what it was told before."""
    source = ModuleWeights(model, dtype=dtype, bucket_bytes=2**14).in_checkpoint_format()
    found = {name: tensor.clone() for name, tensor in source}
    announced = {info.name: (info.shape, info.dtype) for info in source.metadata()}
    assert announced == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}
    assert list(announced) == list(found)
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_is_sent_as_its_files_hold_it(family: Family, tmp_path: Path) -> None:
    model = load_causal_lm(str(family.save(tmp_path / "model")))
    model.save_pretrained(tmp_path / "saved")
    expected = load_file(tmp_path / "saved" / "model.safetensors")
    found = yielded(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_family_whose_files_hold_what_the_model_holds_is_sent_as_it_is(tmp_path: Path) -> None:
    weights = ModuleWeights(load_causal_lm(str(BY_NAME["Llama"].save(tmp_path))))
    assert weights.in_checkpoint_format() is weights
    other = ModuleWeights(nn.Linear(2, 2))
    assert other.in_checkpoint_format() is other


def test_merged_experts_are_sent_one_by_one(tmp_path: Path) -> None:
    lora = LoRA(rank=2, targets="all-linear")
    model = load_causal_lm(str(BY_NAME["Qwen 3 MoE"].save(tmp_path)), lora=lora)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    merged = {weight.name: weight.compute() for weight in merged_weights(model)}
    found = yielded(model)
    gate_up, down = (merged[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    before = dict(load_causal_lm(str(tmp_path)).named_parameters())["model.layers.1.mlp.experts.gate_up_proj"]
    assert not torch.equal(gate_up, before)
    for expert in range(4):
        names = (f"model.layers.1.mlp.experts.{expert}.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj"))
        for name, tensor in zip(names, [*gate_up[expert].chunk(2), down[expert]], strict=True):
            assert torch.equal(found[name], tensor)


def test_a_routers_correction_keeps_its_type_in_a_model_of_16_bits(tmp_path: Path) -> None:
    model = load_causal_lm(str(BY_NAME["GLM 4.5 MoE"].save(tmp_path)))
    found = yielded(model, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(found.pop(name), dict(model.named_buffers())[name])
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
