"""Patches of weights, and transfers of what has changed, without engines; ``test_pool.py`` runs them with vLLM."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.delta import DeltaSender, WeightCopy, apply_patch, encode_patch


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class RecordingSender:
    """A sender that hands what it is given to one worker's copy."""

    backend, recoverable = "gloo", True

    def __init__(self) -> None:
        self.copy = WeightCopy(pinned=False)
        self.names: list[str] = []
        self.loaded: dict[str, Tensor] = {}

    def connect(self, receivers: Any) -> None:
        pass

    def send(self, receivers: Any, infos: Sequence[WeightInfo], weights: Iterator[tuple[str, Tensor]]) -> None:
        self.names = []
        for info, (name, tensor) in zip(infos, weights, strict=True):
            assert info == WeightInfo(name, tuple(tensor.shape), tensor.dtype)
            self.names.append(name)
            self.copy.receive([(name, tensor.clone())])
        self.loaded = dict(self.copy.finish())

    def close(self) -> None:
        pass


def a_model() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed.weight": (300, 700),
        "layers.0.q.weight": (40, 50),
        "layers.0.k.weight": (40, 50),
        "layers.1.q.weight": (40, 50),
        "norm.weight": (50,),
    }
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def send(sender: DeltaSender, weights: dict[str, Tensor]) -> None:
    infos = [WeightInfo(name, tuple(one.shape), one.dtype) for name, one in weights.items()]
    sender.send(None, infos, iter(weights.items()))  # type: ignore[arg-type]  # the stand-in needs no receivers


class TestPatches:
    """One tensor."""

    @settings(max_examples=60, deadline=None)
    @given(
        size=st.sampled_from([0, 1, 511, 512, 513, 65535, 65536, 65537, 200_000]),
        dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8]),
        share=st.sampled_from([0.0, 1e-5, 0.01, 0.7, 1.0]),
        seed=st.integers(0, 99),
    )
    def test_a_patch_restores_every_bit(self, size: int, dtype: torch.dtype, share: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        old = torch.randint(256, (size, dtype.itemsize), dtype=torch.uint8, generator=generator)
        random = torch.randint(256, old.shape, dtype=torch.uint8, generator=generator)
        chosen = torch.rand(size, 1, generator=generator) < share
        new = torch.where(chosen, random, old).view(dtype).reshape(-1)  # any bits: NaN, infinities, -0
        old = old.view(dtype).reshape(-1)
        patch = encode_patch(old, new)
        if equal_bits(old, new):
            assert patch is None
        else:
            assert patch is not None
            apply_patch(old, patch)
            assert equal_bits(old, new)

    def test_few_changes_are_few_bytes(self) -> None:
        old = torch.randn(1000, 1000).bfloat16()
        new = old.clone()
        new.view(-1)[::100] += 1
        patch = encode_patch(old, new)
        assert patch is not None
        assert patch.nbytes == 16 + 4 * 16 + (2 + 2) * 10_000  # 2 % of the tensor

    def test_a_patch_for_another_tensor_is_noticed(self) -> None:
        old = torch.randn(1000)
        new = old.clone()
        new[3] = 7.0
        patch = encode_patch(old, new)
        assert patch is not None
        for index in (0, 3, 999):
            other = old.clone()
            other[index] += 1e-3
            if index == 3:
                apply_patch(other, patch)  # that entry is replaced
                continue
            with pytest.raises(RuntimeError, match="another checksum"):
                apply_patch(other, patch)
        swapped = old.clone()
        swapped[[10, 20]] = old[[20, 10]]
        with pytest.raises(RuntimeError, match="another checksum"):
            apply_patch(swapped, patch)


class TestTransfers:
    """Several tensors, several transfers."""

    def test_only_changed_tensors_are_sent_and_layers_with_a_change_are_loaded_whole(self) -> None:
        inner, weights = RecordingSender(), a_model()
        sender = DeltaSender(inner)
        send(sender, weights)
        total = sum(one.nbytes for one in weights.values())
        assert sender.sent_bytes == total + 16
        assert {name: equal_bits(one, weights[name]) for name, one in inner.loaded.items()} == dict.fromkeys(
            weights, True
        )
        weights["layers.0.q.weight"][3, 4] += 1.0  # in place, as an optimizer does
        weights["layers.1.q.weight"] = -weights["layers.1.q.weight"]
        send(sender, weights)
        assert inner.names == ["rlhfkit.delta", "layers.0.q.weight@patch", "layers.1.q.weight"]
        assert sender.sent_bytes < total / 20
        assert set(inner.loaded) == {"layers.0.q.weight", "layers.0.k.weight", "layers.1.q.weight"}
        assert all(equal_bits(one, weights[name]) for name, one in inner.loaded.items())
        send(sender, weights)
        assert inner.names == ["rlhfkit.delta"]
        assert not inner.loaded

    def test_everything_is_sent_after_a_connect_a_failure_or_a_change_of_the_model(self) -> None:
        inner, weights = RecordingSender(), a_model()
        sender = DeltaSender(inner)
        send(sender, weights)
        sender.connect(None)  # type: ignore[arg-type]
        send(sender, weights)
        assert inner.names == ["rlhfkit.delta", *weights]
        sender.close()
        send(sender, weights)
        assert inner.names == ["rlhfkit.delta", *weights]

        def breaks_off() -> Iterator[tuple[str, Tensor]]:
            yield "embed.weight", -weights["embed.weight"]
            raise OSError("the disk is gone")

        infos = [WeightInfo(name, tuple(one.shape), one.dtype) for name, one in weights.items()]
        with pytest.raises(OSError, match="the disk is gone"):
            sender.send(None, infos, breaks_off())  # type: ignore[arg-type]
        send(sender, weights)
        assert inner.names == ["rlhfkit.delta", *weights]
        assert equal_bits(inner.loaded["embed.weight"], weights["embed.weight"])
        changed = {name: one.float() for name, one in weights.items() if name != "norm.weight"}
        send(sender, changed)
        assert inner.names == ["rlhfkit.delta", *changed]
        assert all(equal_bits(one, changed[name]) for name, one in inner.loaded.items())

    def test_a_worker_that_missed_a_transfer_refuses_the_next_changes(self) -> None:
        inner, weights = RecordingSender(), a_model()
        sender = DeltaSender(inner)
        send(sender, weights)
        inner.copy = WeightCopy(pinned=False)
        weights["norm.weight"][0] += 1
        with pytest.raises(RuntimeError, match="what has changed since transfer 1; here is -1"):
            send(sender, weights)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_on_a_gpu_are_compared_with_the_copy_and_loaded_from_pinned_memory() -> None:
    inner, weights = RecordingSender(), {name: one.cuda() for name, one in a_model().items()}
    inner.copy = WeightCopy(pinned=True)
    sender = DeltaSender(inner)
    for step in range(3):
        weights["layers.0.q.weight"][step] += 1.0
        send(sender, weights)
        assert all(one.is_pinned() for one in inner.loaded.values())
        assert all(equal_bits(one, weights[name].cpu()) for name, one in inner.loaded.items())
    assert inner.names == ["rlhfkit.delta", "layers.0.q.weight@patch"]
