"""Sequence and tensor parallelism: closed forms of memory and messages, and what is refused."""

import dataclasses
from typing import Any

import pytest

from rlhfkit.costs import Efficiency, LayerShape, ModelShape, Run, Sharding, find_gpu, model_shape
from rlhfkit.costs.memory.activations import saved_bytes
from rlhfkit.costs.memory.parts import TRAINING, phase_bytes
from rlhfkit.costs.memory.states import optimizer_bytes, weight_bytes
from rlhfkit.costs.memory.whole_run import memory_parts, memory_problems
from rlhfkit.costs.parallelism import (
    dealt_ranks,
    exchange_bytes,
    joined_bytes,
    on_rank,
    refusals,
    repeated_keys,
    ring_bytes,
    tensor_bytes,
    ulysses_bytes,
)
from rlhfkit.costs.seconds import (
    communication_seconds,
    phase_seconds,
    prepare_seconds,
    sequence_seconds,
    tensor_seconds,
    train_seconds,
)

from .shapes import CONFIGS, build, grpo_70b, llama_70b

PLAIN_HEADS = LayerShape(
    hidden=1024, heads=16, query=1024, key=1024, value=1024, attention_output=1024, intermediate=4096
)
"""As many key heads as heads, as in the papers."""


def divided(**sizes: Any) -> Sharding:
    return Sharding(**({"ranks": 64, "stage": 3} | sizes))


def long_run(**sizes: Any) -> Run:
    """Rows of 131,072 tokens, one in a micro-batch."""
    return grpo_70b(
        engine=None,
        sharding=divided(**sizes),
        prompt_tokens=131072.0,
        answer_tokens=0.0,
        sequences=64,
        group_size=1,
        micro_batch_tokens=131072.0,
    )


def part(run: Run, name: str) -> float:
    return sum(part.bytes for part in memory_parts(run) if part.part == name)


# ------------------------------------------------------------------------------------------------ messages


def test_ulysses_sends_what_its_paper_says() -> None:
    """Section 3.2 of arXiv:2309.14509: 4 N h / P per link for a message of N tokens of width h on P ranks."""
    length, ranks = 8192, 8
    sent = ulysses_bytes(PLAIN_HEADS, length / ranks, divided(sequence=ranks), itemsize=2)
    paper = 2 * 4 * length * PLAIN_HEADS.hidden / ranks
    assert sent == pytest.approx(paper * (ranks - 1) / ranks)  # a rank keeps its own part


def test_the_bytes_of_ulysses_shrink_with_the_ranks_and_those_of_a_ring_do_not() -> None:
    length = 8192
    ulysses = [ulysses_bytes(PLAIN_HEADS, length / size, divided(sequence=size), itemsize=2) for size in (4, 16)]
    ring = [
        ring_bytes(PLAIN_HEADS, length / size, divided(sequence=size, sequence_parallel="ring"), itemsize=2)
        for size in (4, 16)
    ]
    assert ulysses[1] < ulysses[0] / 3
    assert ring[1] == pytest.approx(ring[0] * (15 / 16) / (3 / 4))


def test_a_ring_sends_every_other_block_of_keys_and_values_once() -> None:
    """Section 3 of arXiv:2310.01889: the other P - 1 blocks of c tokens, 2 c h numbers each, pass through a rank."""
    sharding = divided(sequence=4, sequence_parallel="ring")
    assert ring_bytes(PLAIN_HEADS, 100, sharding, itemsize=2) == 2 * 3 * (2 * 100 * 1024)
    eight = divided(sequence=8, sequence_parallel="ring")  # 8 key heads of 128: counted in docs/strategy.md
    sent = [ring_bytes(llama_70b().layer, 1, eight, itemsize=2, backward=backward) / 1024 for backward in (False, True)]
    assert sent == [28, 92]


def test_the_hybrid_exchanges_heads_as_far_as_they_go_and_blocks_beyond() -> None:
    """28 heads on 8 ranks: four neighbours have seven heads each, and two such groups are a ring (arXiv:2405.07719)."""
    layer = dataclasses.replace(PLAIN_HEADS, heads=28, key_heads=4)
    hybrid = divided(sequence=8, sequence_parallel="hybrid")
    assert dealt_ranks(layer, hybrid) == (4, 2)
    assert ulysses_bytes(layer, 100, hybrid, itemsize=2) == ulysses_bytes(layer, 100, divided(sequence=4), itemsize=2)
    pair = divided(sequence=2, sequence_parallel="ring")
    assert ring_bytes(layer, 100, hybrid, itemsize=2) == ring_bytes(layer, 100, pair, itemsize=2)
    parts = [exchange_bytes(layer, 100, sharding, itemsize=2) for sharding in (divided(sequence=4), pair, hybrid)]
    assert parts[0] + parts[1] == parts[2]
    assert dealt_ranks(layer, divided(sequence=4, sequence_parallel="hybrid")) == (4, 1)


def test_tensor_ranks_reduce_the_residual_stream_twice_a_layer() -> None:
    """Section 3 of arXiv:1909.08053: four all-reduces in forward and backward passes of a layer."""
    both = 2 * tensor_bytes(PLAIN_HEADS, 100, divided(tensor=8), itemsize=2)
    assert both == 4 * (2 * 7 / 8) * (2 * 100 * 1024)


def test_fewer_key_heads_than_ranks_are_repeated() -> None:
    layer = llama_70b().layer  # 8 key heads
    assert repeated_keys(layer, divided(sequence=8)) == 1
    assert repeated_keys(layer, divided(sequence=32)) == 4
    assert repeated_keys(layer, divided(sequence=8, tensor=4)) == 4
    assert repeated_keys(dataclasses.replace(layer, key_heads=6), divided(sequence=4)) == 2  # 12 for 4 ranks
    assert repeated_keys(layer, divided(sequence=32, sequence_parallel="ring")) == 1
    few, many = (exchange_bytes(layer, 100, divided(sequence=size), itemsize=2) for size in (8, 32))
    assert many - few == 2 * 2 * 100 * 3 * (1024 + 1024)


# ------------------------------------------------------------------------------------------------ memory


def test_activations_are_divided_by_the_sequence_ranks() -> None:
    alone, together = long_run(), long_run(sequence=8)
    assert part(together, "activations") == part(alone, "activations") / 8
    saved = phase_bytes(memory_parts(alone), TRAINING)["train"] - phase_bytes(memory_parts(together), TRAINING)["train"]
    assert saved > 0.8 * part(alone, "activations")
    assert part(together, "optimizer") == part(alone, "optimizer")  # ZeRO divides states by all ranks as before
    assert part(together, "weights") == part(alone, "weights")


def test_the_layout_of_the_joined_row_does_not_shrink() -> None:
    assert joined_bytes(long_run()) == 0
    assert joined_bytes(long_run(sequence=2)) == joined_bytes(long_run(sequence=64, sequence_parallel="ring")) > 0


def test_answers_after_a_long_prompt_may_all_lie_in_one_part() -> None:
    run = dataclasses.replace(long_run(sequence=8), trained_share=0.05)
    assert run.trained_part_tokens == 0.05 * 131072
    assert dataclasses.replace(run, trained_share=0.5).trained_part_tokens == 131072 / 8


@pytest.mark.parametrize("name", ["llama", "tied llama", "qwen3"])
def test_tensor_ranks_divide_the_matrices_of_the_layers_only(name: str) -> None:
    shape = model_shape(CONFIGS[name])
    matrices = sum(
        parameter.numel() for path, parameter in build(CONFIGS[name]).named_parameters() if path.endswith("proj.weight")
    )
    assert shape.divisible == matrices
    assert on_rank(shape, shape.parameters, 2) == shape.parameters - matrices / 2
    assert on_rank(shape, shape.parameters, 1) == shape.parameters


def test_states_are_divided_by_tensor_ranks_first_and_then_by_zero() -> None:
    """Of 70.55 billion parameters 2.1 billion are embeddings, output layer and norms, which tensor ranks repeat."""
    run = long_run(tensor=8)
    shape = run.policy
    mine = on_rank(shape, shape.parameters, 8)
    assert mine == pytest.approx((shape.parameters - 2 * 128256 * 8192) / 8 + 2 * 128256 * 8192, rel=1e-3)
    assert weight_bytes(run, mine) == 2 * mine / 8  # 64 ranks, 8 with the same part
    assert optimizer_bytes(run, mine) == 12 * mine / 8
    assert part(run, "weights") == weight_bytes(run, mine)


def test_activations_of_tensor_ranks_are_those_of_korthikanti() -> None:
    """Section 4.2 of arXiv:2205.05198: s b h (10 + 24 / t): norms and inputs of projections are whole."""
    shape = model_shape(CONFIGS["llama"])
    one, two, four = (saved_bytes(shape, 100, itemsize=2, tensor=size) for size in (1, 2, 4))
    assert one - two == pytest.approx(2 * (two - four))
    layer = shape.layer
    whole = 2 * (4 + 2) * layer.hidden + 2 * 2 * layer.hidden  # float32 and output of two norms, two inputs
    rest = saved_bytes(shape, 100, itemsize=2, tensor=10**9) - 100 * layer.hidden * 6  # without the last norm
    assert rest == pytest.approx(2 * 100 * whole)


# ------------------------------------------------------------------------------------------------ time


def test_arithmetic_takes_as_long_on_any_division_of_the_ranks() -> None:
    runs = [long_run(), long_run(sequence=8), long_run(tensor=8), long_run(sequence=8, tensor=8)]
    assert len({train_seconds(run) for run in runs}) == 1
    assert len({prepare_seconds(run) for run in runs}) == 1
    assert set(phase_seconds(runs[3])) - set(phase_seconds(runs[0])) == {"sequence_parallel", "tensor_parallel"}


def test_the_closed_form_of_ulysses_seconds() -> None:
    run = dataclasses.replace(long_run(sequence=8), efficiency=Efficiency(link=1.0))
    tokens = 64 * 131072 / 64  # of each rank, in an optimizer step
    each = ulysses_bytes(run.policy.layer, tokens, run.sharding, itemsize=2)
    assert sequence_seconds(run) == pytest.approx(80 * 3 * each / 450e9)  # forward, recomputed, backward


def test_exchanges_over_the_network_take_longer() -> None:
    inside, outside = long_run(sequence=8), long_run(sequence=8, tensor=2)
    per_byte = [
        sequence_seconds(run) / ulysses_bytes(run.policy.layer, 1.0 / run.sharding.data, run.sharding, itemsize=2)
        for run in (inside, outside)
    ]
    assert per_byte[1] > 5 * per_byte[0]  # 50 GB/s in place of 450
    assert tensor_seconds(outside) > 0
    assert tensor_seconds(long_run(tensor=8)) > tensor_seconds(outside)


def test_long_rows_hide_what_a_ring_sends_and_short_ones_do_not() -> None:
    long = long_run(sequence=8, sequence_parallel="ring")
    short = dataclasses.replace(long, prompt_tokens=512.0, sequences=64 * 256)
    assert sequence_seconds(long) == 0
    assert sequence_seconds(short) > 0


def test_groups_with_as_many_tokens_per_rank_gather_weights_equally_often() -> None:
    short = dataclasses.replace(long_run(), micro_batch_tokens=16384.0)
    grouped = dataclasses.replace(long_run(sequence=8), micro_batch_tokens=8 * 16384.0)
    assert grouped.micro_batches == short.micro_batches  # as many tokens per rank in each
    assert communication_seconds(grouped) == communication_seconds(short)


# ------------------------------------------------------------------------------------------------ refusals


def shape_of(heads: int, keys: int, **changes: Any) -> ModelShape:
    shape = llama_70b()
    layer = dataclasses.replace(shape.layer, heads=heads, key_heads=keys)
    return dataclasses.replace(shape, layer=layer, **changes)


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        (shape_of(28, 4), {"sequence": 8}, "sequence_parallel_size=8 does not divide the 28 attention heads: choose"),
        (
            shape_of(64, 8),
            {"sequence": 16, "tensor": 8, "ranks": 128},
            "does not divide the 8 attention heads of a tensor rank (tensor_parallel_size=8)",
        ),
        (shape_of(64, 8), {"tensor": 16}, "tensor_parallel_size=16 does not divide the 8 key heads"),
        (shape_of(64, 8, experts=100), {"tensor": 2}, "does not support mixtures of experts"),
        (shape_of(64, 8, divisible=0), {"tensor": 2}, "no tensor-parallel plan for the family 'llama'"),
    ],
)
def test_sizes_that_a_model_does_not_allow_are_said_first(
    shape: ModelShape, sizes: dict[str, int], message: str
) -> None:
    run = dataclasses.replace(long_run(**sizes), policy=shape)
    problem = memory_problems(run, memory_parts(run))[0]
    assert problem.startswith("policy: ")
    assert message in problem


def test_a_ring_needs_no_heads() -> None:
    assert refusals("policy", shape_of(28, 4), divided(sequence=64, sequence_parallel="ring")) == []
    assert refusals("policy", shape_of(28, 4), divided(sequence=28, ranks=56)) == []
    assert refusals("policy", shape_of(28, 4), divided()) == []


def test_groups_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match=r"sequence_parallel_size 3 \* tensor_parallel_size 1 = 3 ranks"):
        divided(sequence=3)
    with pytest.raises(ValueError, match="sequence_parallel must be one of ulysses, ring, hybrid, got 'tree'"):
        divided(sequence_parallel="tree")
    sharding = divided(sequence=4, tensor=2)
    assert (sharding.group, sharding.data, sharding.shards) == (8, 8, 32)
    assert find_gpu("H100").link > find_gpu("H100").network
