"""Seconds by phase: closed forms, and how they change with what they depend on."""

import dataclasses

import pytest

from rlhfkit.costs import GPU, Efficiency, EngineShape, Sharding, find_gpu
from rlhfkit.costs.seconds import (
    attended,
    checkpoint_seconds,
    communication_seconds,
    decode_step_seconds,
    forward_flops,
    generation_seconds,
    iteration_seconds,
    phase_seconds,
    prepare_seconds,
    survival,
    train_flops,
    train_seconds,
    weight_sync_seconds,
)

from .shapes import grpo_70b, llama_70b


def test_operations_are_those_of_the_palm_paper() -> None:
    """Appendix B of arXiv:2204.02311: 6 N + 12 L H Q T a token, of which causal attention needs half of the second."""
    shape = llama_70b()
    per_token = train_flops(shape, 1, 2048, gradient_checkpointing=False)
    assert per_token == pytest.approx(6 * shape.active + 12 * 80 * 64 * 128 * 2048 / 2)
    assert train_flops(shape, 1, 2048, gradient_checkpointing=True) == pytest.approx(per_token * 4 / 3)


def test_windows_bound_attention() -> None:
    shape = dataclasses.replace(llama_70b(), window=100, windowed_layers=80)
    assert attended(shape, 50) == 25
    assert attended(shape, 1e6) == pytest.approx(100, rel=1e-3)


def test_survival_has_the_mean_of_the_answers() -> None:
    run = grpo_70b(max_answer_tokens=10**6)
    assert sum(survival(run, float(token)) for token in range(60000)) == pytest.approx(4096, rel=0.01)
    assert survival(run, 1e6) == 0
    assert survival(grpo_70b(answer_spread=0.0), 4095) == 1


def test_a_step_of_few_sequences_reads_the_weights_once() -> None:
    gpu = GPU(name="ideal", memory=80e9, flops=1e18, bandwidth=1e12, link=1e12)
    ideal = Efficiency(decode_bandwidth=1.0, decode_step=0.0)
    run = grpo_70b(gpu=gpu, efficiency=ideal)
    assert decode_step_seconds(run, 1, 0) == pytest.approx(run.policy.parameters * 2 / 4 / 1e12)


def test_generation_is_shorter_with_more_engines_and_never_shorter_than_the_longest_answer() -> None:
    few, many = (grpo_70b(engine=EngineShape(count=count, tensor_parallel=4)) for count in (16, 64))
    assert generation_seconds(many) < generation_seconds(few)
    assert generation_seconds(many) > 4096 * decode_step_seconds(many, 1, 512)


def test_pipeline_stages_read_all_weights_each_step_and_share_the_rest() -> None:
    ideal = Efficiency(decode_bandwidth=1.0, decode_step=0.0)
    one, two = (
        grpo_70b(efficiency=ideal, engine=EngineShape(tensor_parallel=4, pipeline_parallel=size)) for size in (1, 2)
    )
    assert decode_step_seconds(two, 1, 0) == pytest.approx(decode_step_seconds(one, 1, 0))
    more = [decode_step_seconds(run, 64, 4096) - decode_step_seconds(run, 1, 0) for run in (one, two)]
    assert more[1] == pytest.approx(more[0] / 2, rel=0.05)


def test_an_engine_that_holds_no_sequence_never_ends() -> None:
    assert generation_seconds(grpo_70b(engine=EngineShape(tensor_parallel=1))) == float("inf")


def test_a_reference_and_old_logprobs_are_forward_passes() -> None:
    run = grpo_70b(updates=1)
    assert prepare_seconds(run) == 0
    both = dataclasses.replace(run, reference=llama_70b(), old_logprobs=True)
    operations = 2 * forward_flops(llama_70b(), run.tokens, run.sequence_tokens)
    assert prepare_seconds(both) == pytest.approx(operations / (256 * 989e12 * 0.5))


def test_zero_3_moves_weights_in_every_micro_batch() -> None:
    first, third = (communication_seconds(grpo_70b(sharding=Sharding(ranks=64, stage=stage))) for stage in (1, 3))
    assert third > 10 * first
    assert communication_seconds(grpo_70b(sharding=Sharding(ranks=1, stage=3))) == 0


def test_colocated_weights_pass_faster_than_over_the_network() -> None:
    apart, here = (grpo_70b(engine=EngineShape(tensor_parallel=4, colocated=colocated)) for colocated in (False, True))
    assert weight_sync_seconds(here) < weight_sync_seconds(apart)


def test_states_that_leave_a_gpu_come_back() -> None:
    engine = EngineShape(count=64, tensor_parallel=4, colocated=True)
    run = grpo_70b(engine=engine, offload_training=True)
    assert phase_seconds(run)["offload"] == pytest.approx(2 * 14 * run.policy.parameters / 256 / 20e9)
    assert "offload" not in phase_seconds(grpo_70b(engine=engine))


def test_a_checkpoint_is_written_by_all_ranks() -> None:
    assert checkpoint_seconds(grpo_70b()) == pytest.approx(14 * 70.55e9 / 256 / 1e9, rel=0.001)


def test_phases_that_overlap_are_not_added() -> None:
    run = grpo_70b()
    phases = phase_seconds(run)
    assert iteration_seconds(run) == pytest.approx(sum(phases.values()))
    assert iteration_seconds(dataclasses.replace(run, max_staleness=1)) == pytest.approx(
        max(phases["generate"], sum(phases.values()) - phases["generate"])
    )


def test_without_an_engine_there_is_training_only() -> None:
    phases = phase_seconds(grpo_70b(engine=None))
    assert set(phases) == {"train", "communication", "optimizer"}
    assert find_gpu("H200").flops == find_gpu("H100").flops
    assert phase_seconds(grpo_70b(engine=None, gpu=find_gpu("H200")))["train"] == phases["train"]


def test_saving_activation_memory_takes_time() -> None:
    run = grpo_70b(engine=None)
    tiled = dataclasses.replace(run, tiled_mlp=4096)
    block = 2 * 3 * 8192 * 28672 * 80  # operations a token
    rate = 256 * find_gpu("H100").flops * run.efficiency.train_flops
    assert train_seconds(tiled) - train_seconds(run) == pytest.approx(run.tokens * block / rate)
    away = dataclasses.replace(run, offload_activations=True)
    copied = 2 * 80 * 8192 * 2 * run.tokens / 256
    assert phase_seconds(away)["offload_activations"] == pytest.approx(copied / 20e9)
    assert "offload_activations" not in phase_seconds(run)
