"""Bytes per GPU: the states of ZeRO's paper, engines, placed models, and what does not fit."""

import dataclasses
from typing import Any

import pytest

from rlhfkit.costs.memory import (
    ENGINE,
    HOST,
    TRAINING,
    bucket_bytes,
    engine_memory,
    gradient_bytes,
    memory_parts,
    memory_problems,
    optimizer_bytes,
    phase_bytes,
    update_bytes,
    weight_bytes,
)
from rlhfkit.costs.model_shape import ModelShape, model_shape
from rlhfkit.costs.run import GIB, EngineShape, PlacedModel, Precision, Run, Sharding, find_gpu
from rlhfkit.models import LoRA
from rlhfkit.modules.optimizers import factories
from rlhfkit.modules.optimizers.factories import state_bytes

from .shapes import CONFIGS, build, grpo_70b, llama_70b


def part(run: Run, name: str, role: str = "policy", place: str = TRAINING) -> float:
    return sum(one.bytes for one in memory_parts(run) if (one.part, one.role, one.place) == (name, role, place))


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_are_those_of_the_zero_paper(stage: int, expected: float) -> None:
    """Figure 1 of arXiv:1910.02054: 7.5 billion parameters on 64 GPUs, gigabytes."""
    run = grpo_70b(sharding=Sharding(ranks=64, stage=stage))
    parameters = 7.5e9
    states = weight_bytes(run, parameters) + gradient_bytes(run, parameters) + optimizer_bytes(run, parameters)
    assert states / 1e9 == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [("adamw", {}, 4), ("adamw", {"fused": False}, 12), ("adamw_8bit", {}, 4), ("sgd", {}, 8)],
)
def test_a_step_needs_its_gradients_in_float32_and_the_temporaries_of_its_kernels(
    name: str, arguments: dict[str, bool], expected: int
) -> None:
    """Fused kernels, AdamW's on GPUs, make none; AdamW's others make two, SGD one."""
    run = grpo_70b(optimizer_state=state_bytes(getattr(factories, name), arguments, fused=True))
    assert part(run, "optimizer step") == pytest.approx(expected * run.policy.parameters / 256)


def test_zero_1_and_2_flatten_gradients_before_they_widen_them() -> None:
    fused = state_bytes(factories.adamw, {}, fused=True)
    for stage, expected in ((1, 6), (2, 6), (3, 4)):
        run = grpo_70b(optimizer_state=fused, sharding=Sharding(ranks=8, stage=stage))
        assert update_bytes(run, run.policy) == pytest.approx(expected * run.policy.parameters / 8)


def adapted() -> ModelShape:
    return model_shape(CONFIGS["llama"], lora=LoRA(rank=4))


@pytest.mark.parametrize("name", ["llama", "tied llama", "qwen3"])
def test_tensor_ranks_divide_the_matrices_of_the_layers_only(name: str) -> None:
    shape = model_shape(CONFIGS[name])
    matrices = sum(
        parameter.numel() for path, parameter in build(CONFIGS[name]).named_parameters() if path.endswith("proj.weight")
    )
    assert shape.on_rank(2) == pytest.approx(shape.parameters - matrices / 2, rel=2e-3)  # norms are counted as divided
    assert shape.on_rank(1) == shape.parameters


def test_states_are_divided_by_tensor_ranks_first_and_then_by_zero() -> None:
    """Of 70.55 billion parameters 2.1 billion are embeddings and output layer, which tensor ranks repeat."""
    run = grpo_70b(sharding=Sharding(ranks=64, stage=3, tensor=8))
    mine = (run.policy.parameters - 2 * 128256 * 8192) / 8 + 2 * 128256 * 8192
    assert part(run, "weights") == pytest.approx(2 * mine / 8)  # 64 ranks, 8 with the same part
    assert part(run, "optimizer") == pytest.approx(12 * mine / 8)


def test_adapters_stay_in_float32_under_lightnings_own_strategies_and_tensor_ranks_hold_them() -> None:
    """As ``test_adapters_stay_in_float32_beside_weights_of_16_bits`` of tests/modules/test_lora.py finds them."""
    run = grpo_70b(policy=adapted(), sharding=Sharding(), precision=Precision.of("bf16-true", deepspeed=False))
    count = run.policy.adapters
    found = [part(run, name) for name in ("adapters", "gradients", "optimizer", "weights")]
    assert found == [4 * count, 4 * count, 8 * count, 2 * run.policy.parameters]
    divided = grpo_70b(policy=adapted(), sharding=Sharding(ranks=4, stage=2, tensor=2))
    assert part(divided, "optimizer") == part(divided, "optimizer step") == 12 * count / 2


def test_frozen_weights_of_4_bits_have_scales() -> None:
    """QLoRA (arXiv:2305.14314, section 3): 0.127 bits a number for scales; embedding, norms and output stay."""
    shape = model_shape(CONFIGS["llama"], lora=LoRA(rank=4), quantization="nf4")
    kept = shape.embedding + shape.head + 5 * 128
    assert shape.quantized == shape.parameters - kept
    run = grpo_70b(policy=shape, sharding=Sharding(ranks=2, stage=2))
    assert part(run, "weights") == pytest.approx(2 * kept + (4 + 0.127) / 8 * shape.quantized, rel=1e-3)


def test_engines_of_8_bits_keep_embedding_and_output_layer() -> None:
    shape = llama_70b()
    plain, small = (grpo_70b(engine=EngineShape(tensor_parallel=4, quantized=quantized)) for quantized in (False, True))
    saved = engine_memory(plain).weights - engine_memory(small).weights
    assert saved == pytest.approx((shape.parameters - shape.embedding - shape.head) / 4)


def test_offloaded_states_and_frozen_weights_are_in_the_hosts_memory() -> None:
    sharding = Sharding(ranks=256, stage=3, offload_optimizer=True, offload_parameters=True)
    run = grpo_70b(sharding=sharding, frozen={"reference": llama_70b()})
    here, away = memory_parts(grpo_70b()), memory_parts(run)
    assert phase_bytes(away, TRAINING)["update"] < phase_bytes(here, TRAINING)["update"] / 2
    assert phase_bytes(here, HOST) == {}
    assert phase_bytes(away, HOST)["train"] > 12 * 70.5e9 / 256
    assert part(run, "weights", "reference") == 0.0
    assert part(run, "weights", "reference", HOST) == 2 * llama_70b().parameters / 256


@pytest.mark.parametrize(
    ("stage", "phase", "buckets"),
    [(None, "train", 0), (0, "update", 0), (1, "train", 1), (2, "train", 2), (3, "train", 1)],
)
def test_gradients_are_reduced_all_at_once_or_from_zero_1_on_in_buckets_of_any_model(
    stage: int | None, phase: str, buckets: int
) -> None:
    """At stage 0 after the backward pass."""
    run = grpo_70b(sharding=Sharding(ranks=8, stage=stage, bucket=1000))
    assert [one.phases for one in memory_parts(run) if one.part == "reduction buckets"] == [(phase,)]
    assert [bucket_bytes(run, count) for count in (10, 10**8)] == ([2000 * buckets] * 2 if buckets else [20, 2e8])


def test_the_cache_is_what_weights_and_activations_leave() -> None:
    found = engine_memory(grpo_70b())
    total = found.weights + found.activations + found.cache
    assert total == pytest.approx(0.9 * find_gpu("H100").memory)
    assert found.weights == pytest.approx(70.55e9 * 2 / 4, rel=0.001)
    # 320 KiB a token over 4 GPUs: 80 KiB a token and GPU.
    assert found.sequences == pytest.approx(found.cache / (4608 * 80 * 1024))


def test_more_gpus_than_key_heads_do_not_split_the_cache_further() -> None:
    found = [engine_memory(grpo_70b(engine=EngineShape(tensor_parallel=size))) for size in (8, 16)]
    assert found[0].cache / found[0].sequences == pytest.approx(found[1].cache / found[1].sequences)


def test_pipeline_stages_divide_layers_and_replicas_divide_experts() -> None:
    four, stages = (grpo_70b(engine=EngineShape(tensor_parallel=4, pipeline_parallel=size)) for size in (1, 2))
    assert engine_memory(stages).weights == engine_memory(four).weights / 2
    per_token = [engine_memory(run).cache / engine_memory(run).sequences for run in (four, stages)]
    assert per_token[1] == pytest.approx(per_token[0] / 2)
    shape = dataclasses.replace(four.policy, experts=60_000_000_000)
    replicas = grpo_70b(policy=shape, engine=EngineShape(tensor_parallel=4, data_parallel=3))
    assert engine_memory(replicas).weights == pytest.approx((shape.parameters - 60e9 + 20e9) * 2 / 4)


def test_colocated_engines_are_awake_only_while_they_generate() -> None:
    parts = memory_parts(grpo_70b(engine=EngineShape(count=64, tensor_parallel=4, memory_share=0.5, colocated=True)))
    totals = phase_bytes(parts, TRAINING)
    assert totals["generate"] > 0.5 * find_gpu("H100").memory
    assert phase_bytes(parts, ENGINE) == {}
    assert totals["train"] == phase_bytes(memory_parts(grpo_70b()), TRAINING)["train"]


def test_training_states_make_room_for_colocated_engines() -> None:
    engine = EngineShape(count=64, tensor_parallel=4, memory_share=0.9, colocated=True)
    staying = grpo_70b(engine=engine, sharding=Sharding(ranks=16, stage=3))
    leaving = dataclasses.replace(staying, offload_training=True)
    assert any("generate" in problem for problem in memory_problems(staying, memory_parts(staying)))
    assert not any("generate" in problem for problem in memory_problems(leaving, memory_parts(leaving)))
    before, after = (phase_bytes(memory_parts(run), TRAINING) for run in (staying, leaving))
    states = 14 * staying.policy.parameters / 16
    assert before["generate"] - after["generate"] == pytest.approx(states)
    assert before["sync"] - after["sync"] == pytest.approx(states * 12 / 14)
    assert before["train"] == after["train"]
    assert phase_bytes(memory_parts(leaving), HOST)["generate"] == pytest.approx(states)


def test_every_model_has_its_parts_once_here_or_there() -> None:
    small = model_shape(CONFIGS["llama"])
    here = grpo_70b(critic=small, frozen={"reference": llama_70b(), "reward model": small})
    assert {"policy", "critic", "reference", "reward model", "engine"} <= {one.role for one in memory_parts(here)}
    apart = grpo_70b(placed=(PlacedModel(role="reference", shape=llama_70b(), replicas=2, gpus=4),))
    assert part(apart, "weights", "reference", "reference GPU") == pytest.approx(2 * llama_70b().parameters / 4)
    assert part(apart, "weights", "reference") == 0
    assert apart.gpus == grpo_70b().gpus + 8


def test_a_critic_on_ranks_of_its_own_needs_what_training_ranks_hold_of_such_a_model() -> None:
    sharding = Sharding(ranks=32, stage=3)
    run = grpo_70b(placed=(PlacedModel(role="critic", shape=llama_70b(), gpus=32, sharding=sharding),))
    alone = grpo_70b(sharding=sharding, engine=None)
    assert phase_bytes(memory_parts(run), "critic GPU") == pytest.approx(phase_bytes(memory_parts(alone), TRAINING))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ("a H100 has 76.7 GiB", "policy activations", "ModelLoading(gradient_checkpointing=True)")),
        ({"gradient_checkpointing": True, "sharding": Sharding(ranks=256, stage=1)}, ("policy weights", "rlhf_zero3")),
        (
            {"gradient_checkpointing": True, "placed": (PlacedModel(role="teacher", shape=llama_70b()),)},
            ("teacher weights", "over more GPUs"),
        ),
        # Engines that cannot start come first.
        ({"engine": EngineShape(tensor_parallel=1)}, ("71.2 GiB",)),
        ({"engine": EngineShape(tensor_parallel=4, cache_bytes=0.5 * GIB)}, ("16,896 tokens",)),
    ],
)
def test_what_does_not_fit_is_named_with_numbers_and_a_cure(changes: dict[str, Any], wanted: tuple[str, ...]) -> None:
    run = grpo_70b(**{"gradient_checkpointing": False} | changes)
    problem = memory_problems(run, memory_parts(run))[0]
    assert [one for one in wanted if one not in problem] == []
