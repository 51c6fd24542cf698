"""Bytes per GPU: the states of ZeRO's paper, engines, and what does not fit.

Covers memory/engines.py, memory/parts.py, memory/passes.py, memory/states.py and memory/whole_run.py.
"""

import dataclasses

import pytest

from rlhfkit.costs import EngineShape, ModelShape, Precision, Sharding, find_gpu, model_shape
from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.memory.engines import engine_memory, iteration_bytes
from rlhfkit.costs.memory.parts import ENGINE, HOST, TRAINING, phase_bytes
from rlhfkit.costs.memory.states import bucket_bytes, gradient_bytes, optimizer_bytes, update_bytes, weight_bytes
from rlhfkit.costs.memory.whole_run import memory_parts, memory_problems
from rlhfkit.models import LoRA
from rlhfkit.modules.optimizers import factories
from rlhfkit.modules.optimizers.factories import state_bytes

from .shapes import CONFIGS, grpo_70b, llama_70b


@pytest.mark.parametrize(("stage", "expected"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_states_are_those_of_the_zero_paper(stage: int, expected: float) -> None:
    """Figure 1 of arXiv:1910.02054: 7.5 billion parameters on 64 GPUs, gigabytes."""
    run = grpo_70b(sharding=Sharding(ranks=64, stage=stage))
    parameters = 7.5e9
    states = weight_bytes(run, parameters) + gradient_bytes(run, parameters) + optimizer_bytes(run, parameters)
    assert states / 1e9 == pytest.approx(expected, abs=0.1)


def test_lightnings_own_strategies_have_no_main_weights() -> None:
    run = grpo_70b(sharding=Sharding(ranks=1), precision=Precision.of("bf16-true", deepspeed=False))
    assert optimizer_bytes(run, 100) == 400
    assert optimizer_bytes(grpo_70b(sharding=Sharding(), precision=Precision.of(32, deepspeed=False)), 100) == 800


@pytest.mark.parametrize(("stage", "expected"), [(0, 800), (1, 1200), (2, 1200), (3, 1200)])
def test_deepspeed_copies_float32_weights_from_stage_1_on(stage: int, expected: int) -> None:
    full = Precision.of(32, deepspeed=True)
    assert optimizer_bytes(grpo_70b(sharding=Sharding(stage=stage), precision=full), 100) == expected


def test_states_are_those_of_the_optimizer() -> None:
    parts = {}
    for name in ("adamw", "muon", "adafactor"):
        state = state_bytes(getattr(factories, name), {})
        found = memory_parts(grpo_70b(optimizer_state=state))
        parts[name] = sum(part.bytes for part in found if part.part == "optimizer")
    run = grpo_70b()
    assert parts["adamw"] == sum(part.bytes for part in memory_parts(run) if part.part == "optimizer")
    shape, ranks = run.policy, run.sharding.shards
    matrices = shape.parameters - shape.embedding - shape.head
    assert parts["adamw"] - parts["muon"] == pytest.approx(4 * matrices / ranks), "one moment in place of two"
    assert parts["adamw"] - parts["adafactor"] == pytest.approx(8 * shape.parameters / ranks)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [("adamw", {}, 4), ("adamw", {"fused": False}, 12), ("adamw_8bit", {}, 4), ("sgd", {}, 8)],
)
def test_a_step_needs_its_gradients_in_float32_and_the_temporaries_of_its_kernels(
    name: str, arguments: dict[str, bool], expected: int
) -> None:
    """Fused kernels, AdamW's on GPUs, make none; AdamW's others make two, SGD one."""
    run = grpo_70b(optimizer_state=state_bytes(getattr(factories, name), arguments, fused=True))
    (step,) = (part.bytes for part in memory_parts(run) if part.part == "optimizer step")
    assert step == pytest.approx(expected * run.policy.parameters / 256)


def test_zero_1_and_2_flatten_gradients_before_they_widen_them() -> None:
    fused = state_bytes(factories.adamw, {}, fused=True)
    for stage, expected in ((1, 6), (2, 6), (3, 4)):
        run = grpo_70b(optimizer_state=fused, sharding=Sharding(ranks=8, stage=stage))
        assert update_bytes(run, run.policy) == pytest.approx(expected * run.policy.parameters / 8)


def adapted() -> ModelShape:
    return model_shape(CONFIGS["llama"], lora=LoRA(rank=4))


def test_tensor_ranks_hold_adapters_and_their_gradients() -> None:
    run = grpo_70b(policy=adapted(), sharding=Sharding(ranks=4, stage=2, tensor=2))
    parts = {part.part: part.bytes for part in memory_parts(run) if part.role == "policy" and part.place == TRAINING}
    assert parts["optimizer"] == 12 * run.policy.adapters / 2
    assert parts["optimizer step"] == 12 * run.policy.adapters / 2


def test_adapters_stay_in_float32_under_lightnings_own_strategies() -> None:
    """As ``test_adapters_stay_in_float32_beside_weights_of_16_bits`` of tests/modules/test_lora.py finds them."""
    run = grpo_70b(policy=adapted(), sharding=Sharding(), precision=Precision.of("bf16-true", deepspeed=False))
    parts = {part.part: part.bytes for part in memory_parts(run) if part.role == "policy" and part.place == TRAINING}
    count = run.policy.adapters
    assert (parts["adapters"], parts["gradients"], parts["optimizer"]) == (4 * count, 4 * count, 8 * count)
    assert parts["weights"] == 2 * run.policy.parameters


def test_frozen_weights_of_4_bits_have_scales() -> None:
    """QLoRA (arXiv:2305.14314, section 3): 0.127 bits a number for scales; embedding, norms and output stay."""
    shape = model_shape(CONFIGS["llama"], lora=LoRA(rank=4), quantization="nf4")
    kept = shape.embedding + shape.head + 5 * 128
    assert shape.quantized == shape.parameters - kept
    run = grpo_70b(policy=shape, sharding=Sharding(ranks=2, stage=2))
    (weights,) = (part.bytes for part in memory_parts(run) if (part.role, part.part) == ("policy", "weights"))
    assert weights == pytest.approx(2 * kept + (4 + 0.127) / 8 * shape.quantized, rel=1e-3)


def test_experts_with_adapters_are_copied() -> None:
    shape = model_shape(CONFIGS["mixtral"], lora=LoRA(rank=4))
    assert shape.adapted_experts == shape.experts
    kept = model_shape(CONFIGS["mixtral"], lora=LoRA(rank=4, experts=False))
    assert kept.adapted_experts == 0
    for checkpointing, copies in ((False, shape.experts), (True, shape.experts / 2)):  # of two layers, or of one
        run = grpo_70b(policy=shape, gradient_checkpointing=checkpointing, micro_batch_tokens=8192.0)
        plain = dataclasses.replace(run, policy=dataclasses.replace(shape, adapted_experts=0))
        more, less = (phase_bytes(memory_parts(one), TRAINING)["train"] for one in (run, plain))
        assert more - less == pytest.approx(2 * copies)


def test_offloaded_weights_of_frozen_models_are_in_the_hosts_memory() -> None:
    sharding = Sharding(ranks=256, stage=3, offload_optimizer=True, offload_parameters=True)
    parts = memory_parts(grpo_70b(sharding=sharding, reference=llama_70b()))
    weights = {part.place: part.bytes for part in parts if (part.role, part.part) == ("reference", "weights")}
    assert weights == {TRAINING: 0.0, HOST: 2 * llama_70b().parameters / 256}


def test_every_teacher_is_held() -> None:
    run = grpo_70b(teacher=llama_70b(), more_teachers=(llama_70b(),) * 2)
    held = [part.role for part in memory_parts(run) if part.part == "weights" and part.role.startswith("teacher")]
    assert held == ["teacher", "teacher 2", "teacher 3"]


def test_engines_of_8_bits_keep_embedding_and_output_layer() -> None:
    shape = llama_70b()
    plain, small = (grpo_70b(engine=EngineShape(tensor_parallel=4, quantized=quantized)) for quantized in (False, True))
    saved = engine_memory(plain).weights - engine_memory(small).weights
    assert saved == pytest.approx((shape.parameters - shape.embedding - shape.head) / 4)
    narrow = grpo_70b(engine=EngineShape(tensor_parallel=4, cache_itemsize=1))
    assert engine_memory(narrow).sequences == pytest.approx(2 * engine_memory(plain).sequences)


def test_offloaded_states_are_in_the_hosts_memory() -> None:
    here = memory_parts(grpo_70b())
    away = memory_parts(
        grpo_70b(sharding=Sharding(ranks=256, stage=3, offload_optimizer=True, offload_parameters=True))
    )
    assert phase_bytes(away, TRAINING)["update"] < phase_bytes(here, TRAINING)["update"] / 2
    assert phase_bytes(away, HOST)["train"] > phase_bytes(here, HOST)["train"] + 12 * 70.5e9 / 256


@pytest.mark.parametrize(("stage", "buckets"), [(1, 1), (2, 2), (3, 1)])
def test_reduction_buckets_do_not_depend_on_the_model(stage: int, buckets: int) -> None:
    run = grpo_70b(sharding=Sharding(ranks=8, stage=stage, bucket=1000))
    assert bucket_bytes(run, 10) == bucket_bytes(run, 10**9) == buckets * 1000 * 2


@pytest.mark.parametrize(("stage", "phase"), [(None, "train"), (0, "update"), (2, "train")])
def test_zero_0_flattens_gradients_after_the_backward_pass(stage: int | None, phase: str) -> None:
    parts = memory_parts(grpo_70b(sharding=Sharding(ranks=8, stage=stage)))
    assert [part.phases for part in parts if part.part == "reduction buckets"] == [(phase,)]


def test_the_cache_is_what_weights_and_activations_leave() -> None:
    run = grpo_70b()
    found = engine_memory(run)
    total = found.weights + found.activations + found.cache
    assert total == pytest.approx(0.9 * find_gpu("H100").memory)
    assert found.weights == pytest.approx(70.55e9 * 2 / 4, rel=0.001)
    # 320 KiB a token over 4 GPUs: 80 KiB a token and GPU.
    assert found.sequences == pytest.approx(found.cache / (4608 * 80 * 1024))


def test_more_gpus_than_key_heads_do_not_split_the_cache_further() -> None:
    eight, sixteen = (grpo_70b(engine=EngineShape(tensor_parallel=size)) for size in (8, 16))
    per_token = [engine_memory(run).cache / engine_memory(run).sequences for run in (eight, sixteen)]
    assert per_token[0] == pytest.approx(per_token[1])


def test_pipeline_stages_divide_layers_and_replicas_divide_experts() -> None:
    four, two_stages = (grpo_70b(engine=EngineShape(tensor_parallel=4, pipeline_parallel=size)) for size in (1, 2))
    assert engine_memory(two_stages).weights == engine_memory(four).weights / 2
    per_token = [engine_memory(run).cache / engine_memory(run).sequences for run in (four, two_stages)]
    assert per_token[1] == pytest.approx(per_token[0] / 2)
    shape = dataclasses.replace(four.policy, experts=60e9)
    replicas = grpo_70b(policy=shape, engine=EngineShape(tensor_parallel=4, data_parallel=3))
    assert engine_memory(replicas).weights == pytest.approx((shape.parameters - 60e9 + 20e9) * 2 / 4)


def test_colocated_engines_are_awake_only_while_they_generate() -> None:
    parts = memory_parts(grpo_70b(engine=EngineShape(count=64, tensor_parallel=4, memory_share=0.5, colocated=True)))
    totals = phase_bytes(parts, TRAINING)
    assert totals["generate"] > 0.5 * find_gpu("H100").memory
    assert phase_bytes(parts, ENGINE) == {}
    alone = phase_bytes(memory_parts(grpo_70b()), TRAINING)
    assert totals["train"] == alone["train"]


def test_training_states_make_room_for_colocated_engines() -> None:
    engine = EngineShape(count=64, tensor_parallel=4, memory_share=0.9, colocated=True)
    sharding = Sharding(ranks=16, stage=3)
    staying = grpo_70b(engine=engine, sharding=sharding)
    leaving = dataclasses.replace(staying, offload_training=True)
    assert any("generate" in problem for problem in memory_problems(staying, memory_parts(staying)))
    assert not any("generate" in problem for problem in memory_problems(leaving, memory_parts(leaving)))
    before, after = (phase_bytes(memory_parts(run), TRAINING) for run in (staying, leaving))
    states = 14 * staying.policy.parameters / 16
    assert before["generate"] - after["generate"] == pytest.approx(states)
    assert before["sync"] - after["sync"] == pytest.approx(states * 12 / 14)
    assert before["train"] == after["train"]
    assert phase_bytes(memory_parts(leaving), HOST)["generate"] > states


def test_samples_stay_within_the_bound() -> None:
    run = grpo_70b()
    assert iteration_bytes(run) == 40 * 16384 * 4608 / 256 + 200 * 16384


def test_a_run_that_fits_has_no_problem() -> None:
    run = grpo_70b()
    assert memory_problems(run, memory_parts(run)) == []


def test_what_does_not_fit_is_named_with_numbers_and_a_cure() -> None:
    run = grpo_70b(gradient_checkpointing=False)
    (problem,) = memory_problems(run, memory_parts(run))
    assert problem.startswith("train: ")
    assert "a H100 has 76.7 GiB; the largest parts are policy activations" in problem
    assert problem.endswith("Set gradient_checkpointing=True, or divide rows over more ranks (sequence_parallel_size)")


def test_weights_that_do_not_fit_ask_for_sharding() -> None:
    run = grpo_70b(sharding=Sharding(ranks=256, stage=1))
    assert any(
        "Use strategy='rlhf_zero3' in place of stage 1" in one for one in memory_problems(run, memory_parts(run))
    )


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (EngineShape(tensor_parallel=1), "leave no key-value cache in 71.2 GiB: raise tensor_parallel_size"),
        (EngineShape(tensor_parallel=3), "tensor_parallel_size=3 does not divide the 64 attention heads"),
        (EngineShape(pipeline_parallel=81), "pipeline_parallel_size=81 is more than the 80 layers"),
        (EngineShape(tensor_parallel=4, cache_bytes=0.5 * GIB), "too small for one sequence of 16,896 tokens"),
    ],
)
def test_engines_that_cannot_start_come_first(engine: EngineShape, message: str) -> None:
    run = grpo_70b(engine=engine, gradient_checkpointing=False)
    assert message in memory_problems(run, memory_parts(run))[0]


def test_a_critic_and_a_reference_add_their_parts() -> None:
    small = model_shape(CONFIGS["llama"])
    run = dataclasses.replace(grpo_70b(), critic=small, reference=small, reward_model=small)
    roles = {part.role for part in memory_parts(run)}
    assert {"policy", "critic", "reference", "reward model", "engine"} <= roles


def test_checkpoints_wait_in_the_hosts_memory() -> None:
    here, away = (memory_parts(grpo_70b(offload_activations=offload)) for offload in (False, True))
    inputs = 80 * 16384 * 8192 * 2
    assert phase_bytes(away, HOST)["train"] - phase_bytes(here, HOST)["train"] == inputs
    saved = phase_bytes(here, TRAINING)["train"] - phase_bytes(away, TRAINING)["train"]
    assert saved == inputs - 2 * 16384 * 8192 * 2  # two layers' inputs are on the GPU while a layer is recomputed
    assert memory_parts(grpo_70b(offload_activations=True, gradient_checkpointing=False)) == memory_parts(
        grpo_70b(gradient_checkpointing=False)
    )
