"""Covers ``forward_groups.py``: what is refused (equal steps: ``test_step_properties.py``)."""

from typing import Any

import lightning as L
import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfkit.mesh import FORWARD_GROUP, ForwardGroup, Mesh, SequenceParallel, forward_group_of, mesh_of
from rlhfkit.models.attention.families import use_packed_attention
from rlhfkit.strategies import RLHFDeepSpeedStrategy
from rlhfkit.strategies.forward_groups import check_model, hugging_face_models


def model(*, heads: int = 4, packed: bool = True) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 1}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads))
    if packed:
        use_packed_attention(made)
    return made


def group(sequence: int, kind: SequenceParallel = "ulysses") -> ForwardGroup:
    return ForwardGroup(Mesh(0, sequence, sequence=sequence), None, None, None, kind)


def test_the_mesh_is_known_and_checked_when_the_trainer_is_made() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    with pytest.raises(ValueError, match=r"sequence_parallel_size 2 \* .* does not divide the 3 rank"):
        L.Trainer(strategy=RLHFDeepSpeedStrategy(sequence_parallel_size=2), devices=3, **options)
    trainer = L.Trainer(strategy=RLHFDeepSpeedStrategy(sequence_parallel_size=2), devices=4, **options)
    assert mesh_of(trainer) == Mesh(0, 4, sequence=2)


def test_a_model_that_several_ranks_cannot_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'policy' \(LlamaForCausalLM\) runs with attention 'sdpa'"):
        check_model("policy", model(packed=False), group(2))
    with pytest.raises(ValueError, match=r"4 ranks .* do not divide the 6 of 'policy' .* sequence_parallel='ring'"):
        check_model("policy", model(heads=6), group(4))
    check_model("policy", model(heads=6), group(4, "ring"))
    check_model("policy", model(heads=6), group(3))


def test_the_outermost_model_is_found_in_wrappers_and_forgets_its_group() -> None:
    inner = model()
    module = nn.ModuleDict({"policy": nn.Sequential(inner), "other": nn.Linear(2, 2)})
    assert list(hugging_face_models(module)) == [("policy.0", inner)]
    setattr(inner, FORWARD_GROUP, group(2))
    assert forward_group_of(inner) is not None
    RLHFDeepSpeedStrategy().detach_forward_group(module)
    assert forward_group_of(inner) is None
