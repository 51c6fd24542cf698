"""Bytes of activations, against what autograd saves of real models, and closed forms of papers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfkit.costs.memory import HOST, TRAINING, layer_bytes, memory_parts, phase_bytes, saved_bytes
from rlhfkit.costs.model_shape import ModelShape, model_shape
from rlhfkit.costs.run import GPU, Precision, Run, Sharding
from rlhfkit.models.forward import policy_output
from rlhfkit.models.load import choose_attention

from .shapes import CONFIGS, build, grpo_70b

SEQUENCES, LENGTH = 4, 256
TOKENS = SEQUENCES * LENGTH


def run_of(name: str | ModelShape, tokens: float = TOKENS, itemsize: int = 2, **changes: Any) -> Run:
    shape = model_shape(CONFIGS[name]) if isinstance(name, str) else name
    types = Precision(weights=itemsize, compute=itemsize)
    fields = {"gpu": GPU("toy", 1e12, 1e12, 1e12), "precision": types, "micro_batch_tokens": float(tokens)}
    return Run(policy=shape, **(fields | changes))


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


@pytest.mark.parametrize(
    ("name", "dtype", "checkpointing", "tolerance"),
    [
        ("llama", torch.float32, False, 0.02),  # the rest: indices, angles, scalars
        ("llama", torch.bfloat16, False, 0.02),
        ("qwen3", torch.float32, False, 0.02),
        ("qwen3", torch.bfloat16, False, 0.02),
        ("mixtral", torch.float32, False, 0.15),
        ("llama", torch.float32, True, 0.05),
    ],
)
def test_saved_activations_are_those_that_autograd_saves(
    name: str, dtype: torch.dtype, checkpointing: bool, tolerance: float
) -> None:
    run = run_of(name, itemsize=dtype.itemsize, gradient_checkpointing=checkpointing)
    selected = TOKENS * run.policy.layer.hidden * dtype.itemsize  # hidden states of the output layer, in head_bytes
    measured = saved_by_autograd(name, dtype, gradient_checkpointing=checkpointing)
    assert saved_bytes(run, run.policy) + selected == pytest.approx(measured, rel=tolerance)


def test_eager_attention_grows_with_the_square_of_the_length() -> None:
    def extra(tokens: int) -> float:
        eager = run_of("llama", tokens, attention="eager", prompt_tokens=float(tokens), answer_tokens=0.0)
        return layer_bytes(eager, eager.policy) - layer_bytes(run_of("llama", tokens), eager.policy)

    heads = model_shape(CONFIGS["llama"]).layer.heads
    assert extra(4096) == 4 * extra(2048) == 4096 * 4096 * heads * 6


def test_answers_after_a_long_prompt_may_all_lie_in_one_part() -> None:
    run = grpo_70b(sharding=Sharding(ranks=8, sequence=8), micro_batch_tokens=131072.0, trained_share=0.05)
    assert run.trained_part_tokens == 0.05 * 131072
    assert dataclasses.replace(run, trained_share=0.5).trained_part_tokens == 131072 / 8


def test_activations_of_tensor_ranks_are_those_of_korthikanti() -> None:
    """Section 4.2 of arXiv:2205.05198: s b h (10 + 24 / t): norms and inputs of projections are whole."""
    runs = [run_of("llama", 100, sharding=Sharding(ranks=4, tensor=size)) for size in (1, 2, 4)]
    one, two, four = (saved_bytes(run, run.policy) for run in runs)
    assert one - two == pytest.approx(2 * (two - four))
    layer = runs[0].policy.layer
    whole = 2 * (4 + 2) * layer.hidden + 2 * 2 * layer.hidden  # float32 and output of two norms, two inputs
    rest = four - (two - four) - 100 * layer.hidden * 6  # at infinitely many ranks, without the last norm
    assert rest == pytest.approx(2 * 100 * whole)


def test_checkpoints_wait_in_the_hosts_memory() -> None:
    here, away = (memory_parts(grpo_70b(offload_activations=offload)) for offload in (False, True))
    inputs = 80 * 16384 * 8192 * 2
    host = sum(part.bytes for part in away if part.part == "activations" and part.place == HOST)
    assert host == inputs
    saved = phase_bytes(here, TRAINING)["train"] - phase_bytes(away, TRAINING)["train"]
    assert saved == inputs - 2 * 16384 * 8192 * 2  # two layers' inputs are on the GPU while a layer is recomputed
