"""Bytes of activations, against what autograd saves of real models.

Covers memory/activations.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfkit.costs import ModelShape, model_shape
from rlhfkit.costs.memory.activations import (
    backward_bytes,
    head_bytes,
    inference_bytes,
    layer_bytes,
    saved_bytes,
    tile_bytes,
)
from rlhfkit.losses.fused_head.tiles import tile_columns
from rlhfkit.models.forward import policy_output
from rlhfkit.models.load import choose_attention

from .shapes import CONFIGS, build

SEQUENCES, LENGTH = 4, 256
TOKENS = SEQUENCES * LENGTH


def saved_by_autograd(name: str, dtype: torch.dtype, *, gradient_checkpointing: bool = False) -> int:
    """Bytes of all tensors but weights that a forward pass of a real model saves, each storage once."""
    torch.manual_seed(0)
    model: Any = build(CONFIGS[name]).to(dtype)
    choose_attention(model, None)
    model.train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, 1000, (SEQUENCES, LENGTH))
    batch = SimpleNamespace(input_ids=ids, attention_mask=torch.ones_like(ids, dtype=torch.bool))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = policy_output(model, batch, torch.ones(SEQUENCES, LENGTH - 1, dtype=torch.bool))
    assert out.logprobs.requires_grad
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_saved_activations_are_those_that_autograd_saves(name: str, dtype: torch.dtype) -> None:
    shape = model_shape(CONFIGS[name])
    expected = saved_bytes(shape, TOKENS, itemsize=dtype.itemsize) + TOKENS * shape.layer.hidden * dtype.itemsize
    assert expected == pytest.approx(saved_by_autograd(name, dtype), rel=0.02)  # the rest: indices, angles, scalars


def test_a_mixture_saves_about_what_is_estimated() -> None:
    shape = model_shape(CONFIGS["mixtral"])
    assert saved_bytes(shape, TOKENS, itemsize=4) == pytest.approx(
        saved_by_autograd("mixtral", torch.float32), rel=0.15
    )


def test_with_checkpointing_only_inputs_of_layers_are_saved() -> None:
    shape = model_shape(CONFIGS["llama"])
    expected = saved_bytes(shape, TOKENS, itemsize=4, gradient_checkpointing=True)
    expected += TOKENS * shape.layer.hidden * 4  # selected hidden states, which head_bytes has
    measured = saved_by_autograd("llama", torch.float32, gradient_checkpointing=True)
    assert expected == pytest.approx(measured, rel=0.05)


def test_eager_attention_grows_with_the_square_of_the_length() -> None:
    layer = model_shape(CONFIGS["llama"]).layer

    def extra(tokens: int) -> float:
        eager = layer_bytes(layer, tokens, itemsize=2, attention="eager", longest=tokens)
        return eager - layer_bytes(layer, tokens, itemsize=2)

    assert extra(4096) == 4 * extra(2048) == 4096 * 4096 * layer.heads * 6


def test_the_tile_is_that_of_the_fused_head() -> None:
    columns = tile_columns(4096, 128256, torch.bfloat16, "cuda")
    assert tile_bytes(128256, 20000, 2, False, "cuda") == 4096 * columns * 4
    columns = tile_columns(1000, 1000, torch.float32, "cpu")
    assert tile_bytes(1000, 1000, 4, True, "cpu") == 1000 * columns * 8


def test_the_fused_head_needs_a_fraction_of_the_dense_one() -> None:
    shape = ModelShape(**(vars(model_shape(CONFIGS["llama"])) | {"vocabulary": 128256, "head": 128 * 128256}))
    fused = head_bytes(shape, 16384, itemsize=2, trained=False)
    dense = head_bytes(shape, 16384, itemsize=2, fused=False, trained=False)
    assert fused < dense / 20


def test_a_forward_pass_without_gradient_holds_less_than_a_layer_saves() -> None:
    shape = model_shape(CONFIGS["llama"])
    assert inference_bytes(shape, 100, itemsize=2) < layer_bytes(shape.layer, 100, itemsize=2)


def test_tiles_of_feed_forward_blocks_leave_only_attention_and_norms() -> None:
    layer = model_shape(CONFIGS["llama"]).layer
    whole, tiled = (layer_bytes(layer, 1000, itemsize=2, tiled=on) for on in (False, True))
    assert whole - tiled == 1000 * 4 * 2 * layer.intermediate
    plain, in_tiles = (backward_bytes(layer, 100_000, itemsize=2, tile=tile) for tile in (None, 100))
    attention = layer.query + layer.key + layer.value + layer.attention_output
    assert in_tiles == 2 * 100_000 * (attention + 2 * layer.hidden)
    assert plain > in_tiles
    assert backward_bytes(layer, 100, itemsize=2, tile=100) == backward_bytes(layer, 100, itemsize=2)
