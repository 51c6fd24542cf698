"""Which LoRA adapters engines apply themselves; that they do it right is tested with engines, in ``test_pool.py``.

Covers ``pool.py``'s choice too.
"""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhfkit.models import LoRA, ModelLoading, load_causal_lm
from rlhfkit.rollout.vllm.adapter_slot import adapter_arguments
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.source import ADAPTER_SETTINGS, ModuleWeights


def adapted(folder: Path, **arguments: Any) -> nn.Module:
    return load_causal_lm(str(folder), loading=ModelLoading(attention="sdpa"), lora=LoRA(**arguments))


def settings_of(rank: int, **others: Any) -> dict[str, Any]:
    return {"r": rank, "rank_pattern": {}, "target_modules": ["q_proj"], **others}


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (9, 16), (200, 256), (512, 512)])
def test_the_slot_is_the_smallest_of_vllms_that_holds_the_adapter(rank: int, slot: int) -> None:
    arguments = adapter_arguments(settings_of(rank))
    assert arguments == {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": slot, "lora_target_modules": ["q_proj"],
    }  # fmt: skip
    assert adapter_arguments(settings_of(1, rank_pattern={"q_proj": rank}))["max_lora_rank"] == slot


def test_the_matrices_alone_are_sent_where_engines_apply_them(folder: Path) -> None:
    model = adapted(folder, rank=4, alpha=6.0, rslora=True, targets=("q_proj", "up_proj"))
    pool = VLLMPool()
    pool.configure_weights(ModuleWeights(model))
    assert pool.adapter == {
        "r": 4, "lora_alpha": 6.0, "use_rslora": True, "rank_pattern": {}, "alpha_pattern": {},
        "target_modules": ["q_proj", "up_proj"],
    }  # fmt: skip
    alone, both = (ModuleWeights(model).adapter_apart(with_base=with_base) for with_base in (False, True))
    names = [info.name for info in alone.metadata()]
    assert names[:2] == [
        ADAPTER_SETTINGS,
        "rlhfkit.adapter.base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
    ]
    assert len(names) == 1 + 2 * 2 * 2
    base = load_causal_lm(str(folder), loading=ModelLoading(attention="sdpa"))
    expected = dict(ModuleWeights(base).in_checkpoint_format()) | {name: tensor.clone() for name, tensor in alone}
    yielded = {name: tensor.clone() for name, tensor in both}
    assert [(info.name, info.shape) for info in both.metadata()] == [
        (name, tuple(tensor.shape)) for name, tensor in yielded.items()
    ]
    assert yielded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in yielded.items())


@pytest.mark.parametrize("with_base", [False, True])
def test_an_adapter_that_is_not_finite_raises_before_anything_is_sent(folder: Path, with_base: bool) -> None:
    model = adapted(folder)
    matrix = next(parameter for parameter in model.parameters() if parameter.requires_grad)
    with torch.no_grad():
        matrix[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"not finite .*lora_A"):
        next(iter(ModuleWeights(model).adapter_apart(with_base=with_base)))


class Doubled(ModuleWeights):
    """Yields other weights than the policy's."""


@pytest.mark.parametrize(
    ("arguments", "kind", "pool", "reason"),
    [
        ({"dora": True}, ModuleWeights, {}, r"q_proj has more than two matrices \(DoRA\)"),
        ({"rank": 600}, ModuleWeights, {}, "up to rank 512, and its rank is 600"),
        ({}, Doubled, {}, "Doubled may yield other weights"),
        ({}, ModuleWeights, {"colocate": True}, "engines on the ranks' GPUs"),
    ],
    ids=["dora", "rank", "source", "colocate"],
)
def test_any_other_is_merged_and_the_reason_is_logged(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    arguments: dict[str, Any],
    kind: type[ModuleWeights],
    pool: dict[str, Any],
    reason: str,
) -> None:
    weights, chosen = kind(adapted(folder, **arguments)), VLLMPool(**pool)
    with caplog.at_level(logging.WARNING):
        chosen.configure_weights(weights)
    assert chosen.adapter is None
    assert re.search(f"the LoRA adapter is merged at every sync: .*{reason}", caplog.text)


def test_without_an_adapter_or_with_merge_nothing_is_decided(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = ModuleWeights(load_causal_lm(str(folder), loading=ModelLoading(attention="sdpa")))
    for pool, weights in [(VLLMPool(), plain), (VLLMPool(lora="merge"), ModuleWeights(adapted(folder)))]:
        pool.configure_weights(weights)
        assert pool.adapter is None
    assert not [record for record in caplog.records if record.name.startswith("rlhfkit")]
    with pytest.raises(ValueError, match=r"VLLMPool\(lora='adapter'\) is not possible: the policy has no LoRA adapter"):
        VLLMPool(lora="adapter").configure_weights(plain)
