"""Weights out of a module, in buckets; out of shards: ``vllm/zero3_ranks.py``. Covers ``sender.py`` too."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.sender import verified
from rlhfkit.rollout.weight_sync.source import ModuleWeights, plan_buckets

infos = st.lists(
    st.builds(
        WeightInfo,
        name=st.just("weight"),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]),
    ),
    max_size=20,
)


@settings(max_examples=150)
@given(infos=infos, capacity=st.integers(1, 5000), seed=st.integers(0, 100))
def test_every_tensor_is_in_one_bucket_in_order_and_comes_back_unchanged(
    infos: list[WeightInfo], capacity: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [(100 * torch.rand(info.shape, generator=generator)).to(info.dtype) for info in infos]
    buckets = plan_buckets(infos, capacity)
    assert [b.first + n for b in buckets for n in range(len(b.offsets))] == list(range(len(infos)))
    for bucket in buckets:
        assert bucket.num_bytes <= capacity or len(bucket.offsets) == 1
        block, own = torch.empty(bucket.num_bytes, dtype=torch.uint8), tensors[bucket.first :][: len(bucket.offsets)]
        for (_, view), tensor in zip(bucket.views(block, infos), own, strict=True):
            view.copy_(tensor)
        for (_, view), tensor in zip(bucket.views(block.clone(), infos), own, strict=True):  # none overlaps another
            assert torch.equal(view, tensor)


class TestModuleWeights:
    """Names, shapes, types; each weight once."""

    @pytest.mark.parametrize("tied", [True, False])
    def test_yields_what_a_checkpoint_holds(self, tmp_path: Path, tied: bool) -> None:
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM

        folder = tiny_model(tmp_path, tied=tied)
        saved = load_file(folder / "model.safetensors")  # save_pretrained leaves out tied weights too
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model.model.embed_tokens.requires_grad_(False)  # frozen weights are served like any others
        weights = ModuleWeights(AveragedModel(AveragedModel(model)))  # which hold it as DDP and DeepSpeed do
        yielded = dict(weights)
        assert yielded.keys() == saved.keys()
        assert all(torch.equal(yielded[name], saved[name]) for name in saved)
        assert [info.name for info in weights.metadata()] == list(yielded)
        assert all(not tensor.requires_grad for tensor in yielded.values())
        assert ("lm_head.weight" in yielded) is not tied

    def test_names_are_those_of_the_module_inside_torch_compile(self) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        assert [info.name for info in ModuleWeights(torch.compile(model)).metadata()] == [
            "0.weight", "0.bias", "1.weight", "1.bias",
        ]  # and the batch norm's buffers are left out  # fmt: skip

    def test_dtype_is_that_asked_for(self) -> None:
        model = nn.Linear(3, 2)
        weights = ModuleWeights(model, dtype=torch.bfloat16)
        assert {info.dtype for info in weights.metadata()} == {torch.bfloat16}
        assert all(torch.equal(t, model.get_parameter(n).detach().bfloat16()) for n, t in weights)
        assert {tensor.dtype for _, tensor in weights} == {torch.bfloat16}

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_weight_that_is_not_finite_raises_before_the_first_is_yielded_and_a_large_sum_does_not(
        self, value: float
    ) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        nn.init.constant_(model[0].weight, 3e38)  # finite, and their sum is not
        assert len(list(ModuleWeights(model))) == 4
        with torch.no_grad():
            model[1].weight[2, 1] = value
        with pytest.raises(ValueError, match=r"1 of 4 weights are not finite \(first: '1.weight'\)"):
            next(iter(ModuleWeights(model)))
        assert len(list(ModuleWeights(model, check_finite=False))) == 4

    def test_modules_that_cannot_be_sent_say_why(self) -> None:
        with pytest.raises(ValueError, match="Identity has no parameters"):
            ModuleWeights(nn.Identity())
        from peft import LoraConfig, get_peft_model

        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        adapted = get_peft_model(layers, LoraConfig(r=1, target_modules=["0"], modules_to_save=["1"]))
        with pytest.raises(NotImplementedError, match="leave out modules_to_save"):
            ModuleWeights(adapted)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda pairs: pairs[:-1], "announced 2 tensors and yields 1"),
            (lambda pairs: [*pairs, ("extra", torch.ones(1))], "'extra' after the 2 tensors"),
            (lambda pairs: [pairs[1], pairs[0]], "announced WeightInfo.*'weight'.*and yields WeightInfo.*'bias'"),
        ],
    )
    def test_a_stream_that_differs_from_its_announcement_is_refused(
        self, change: Callable[[list[Any]], list[Any]], message: str
    ) -> None:
        weights = ModuleWeights(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=message):
            list(verified(weights.metadata(), iter(change(list(weights)))))
