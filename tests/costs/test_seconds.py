"""Seconds by phase: closed forms, and how they change with what they depend on."""

import dataclasses

import pytest

from rlhfkit.costs import GPU, Efficiency, EngineShape, Sharding, find_gpu, model_shape
from rlhfkit.costs.seconds import (
    attended,
    checkpoint_seconds,
    communication_seconds,
    decode_step_seconds,
    forward_flops,
    generation_seconds,
    iteration_seconds,
    optimizer_seconds,
    phase_seconds,
    prepare_seconds,
    survival,
    train_flops,
    train_seconds,
    weight_sync_seconds,
)
from rlhfkit.models import LoRA
from rlhfkit.modules.optimizers import factories
from rlhfkit.modules.optimizers.factories import state_bytes

from .shapes import CONFIGS, grpo_70b, llama_70b


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


def test_a_step_computes_what_a_token_of_a_forward_pass_does() -> None:
    """A token at position c attends to c others, so that a sequence's tokens, one by one, are its forward pass."""
    gpu = GPU(name="slow", memory=80e9, flops=1e9, bandwidth=1e18, link=1e12)
    engine = EngineShape(tensor_parallel=1)
    windows = dataclasses.replace(llama_70b(), window=100, windowed_layers=40)
    for shape in (llama_70b(), windows):
        run = grpo_70b(policy=shape, gpu=gpu, engine=engine, efficiency=Efficiency(forward_flops=1.0, decode_step=0.0))
        one_by_one = sum(decode_step_seconds(run, 1, position + 0.5) for position in range(400))
        assert one_by_one == pytest.approx(forward_flops(shape, 400, 400) / 1e9, rel=1e-5)


def test_a_step_reads_what_layers_with_a_window_keep() -> None:
    gpu = GPU(name="ideal", memory=80e9, flops=1e18, bandwidth=1e12, link=1e12)
    windows = dataclasses.replace(llama_70b(), window=100, windowed_layers=40)
    run = grpo_70b(policy=windows, gpu=gpu, efficiency=Efficiency(decode_bandwidth=1.0, decode_step=0.0))
    cache = decode_step_seconds(run, 10, 1000) - decode_step_seconds(run, 10, 0)
    assert cache == pytest.approx(10 * (1000 + 100) / 2 * 80 * 1024 / 1e12)  # 80 KiB a token and GPU


@pytest.mark.parametrize("sequences", [1, 3])
def test_a_step_reads_the_experts_that_are_hit(sequences: int) -> None:
    shape = model_shape(CONFIGS["mixtral"])  # two of four experts
    gpu = GPU(name="ideal", memory=80e9, flops=1e18, bandwidth=1e12, link=1e12)
    ideal = Efficiency(decode_bandwidth=1.0, decode_step=0.0)
    run = grpo_70b(policy=shape, gpu=gpu, efficiency=ideal, engine=EngineShape())
    read = shape.parameters - shape.experts * 0.5**sequences
    assert decode_step_seconds(run, sequences, 0) == pytest.approx(2 * read / 1e12)


def test_critics_and_reward_models_compute_no_output_layer() -> None:
    shape = llama_70b()
    with_critic = dataclasses.replace(grpo_70b(), critic=shape, reward_model=shape)
    rate = 256 * 989e12
    layers = forward_flops(shape, 1, 4608) - 2 * shape.head + 2 * 8192
    more = train_seconds(with_critic) - train_seconds(grpo_70b())
    assert more == pytest.approx(4 * layers * with_critic.tokens / (rate * 0.4))
    more = prepare_seconds(with_critic) - prepare_seconds(grpo_70b())
    assert more == pytest.approx(2 * layers * with_critic.tokens / (rate * 0.5))


def test_the_policy_without_its_adapters_is_computed_as_a_reference() -> None:
    run = grpo_70b(updates=1)
    twice = dataclasses.replace(run, reference_is_policy=True)
    expected = forward_flops(run.policy, run.tokens, run.sequence_tokens) / (256 * 989e12 * 0.5)
    assert prepare_seconds(twice) == pytest.approx(expected)
    offline, compared = (dataclasses.replace(one, engine=None) for one in (run, twice))
    assert train_seconds(compared) - train_seconds(offline) == pytest.approx(expected)


def test_old_log_probs_of_later_updates_may_be_left_out() -> None:
    run = grpo_70b(updates=4)
    assert prepare_seconds(run) > 0
    assert prepare_seconds(dataclasses.replace(run, later_logprobs=False)) == 0


def test_several_teachers_divide_the_prompts() -> None:
    run = grpo_70b(updates=1, teacher=llama_70b())
    assert prepare_seconds(dataclasses.replace(run, more_teachers=(llama_70b(),))) == prepare_seconds(run)


def test_prompts_are_shared_and_weights_gathered_by_micro_batch() -> None:
    """Micro-batches of one sequence: none shares its prompt, and each gathers all weights, however short it is."""
    run = grpo_70b(micro_batch_sequences=1, micro_batch_tokens=16896.0, sharding=Sharding(ranks=64, stage=3))
    assert run.tokens == 16384 * 4608
    assert run.micro_batches == 16384 / 64
    moved = 256 * 3 * 2 * run.policy.parameters * 63 / 64
    assert communication_seconds(run) == pytest.approx(moved / (50e9 * 0.7) * 0.5)
    assert dataclasses.replace(run, micro_batch_sequences=4).tokens == 16384 * (4096 + 512 / 4)


def test_an_optimizer_moves_its_own_state() -> None:
    """Gradients are read, main weights and states read and written: 4 + 8 + 2 times the state, of 4 updates."""
    seconds = {}
    for name in ("adamw", "adamw_8bit", "sgd", "muon"):
        run = grpo_70b(optimizer_state=state_bytes(getattr(factories, name), {}))
        seconds[name] = optimizer_seconds(run) / 4 / run.policy.parameters * 256
    assert seconds["adamw"] == pytest.approx(28 / 3.35e12)
    assert seconds["adamw_8bit"] == pytest.approx((12 + 2 * 2.03125) / 3.35e12)
    assert seconds["sgd"] == pytest.approx(12 / 3.35e12)
    shape = llama_70b()
    matrices = 1 - (shape.embedding + shape.head) / shape.parameters
    traffic = (matrices * 20 + (1 - matrices) * 28) / 3.35e12
    # Of X with H rows and columns, X X', its square and its product with X: 6 H^3 operations for H^2 numbers.
    assert seconds["muon"] == pytest.approx(traffic + matrices * 5 * 6 * 8192 / (989e12 * 0.4))


def test_offloaded_states_and_weights_come_and_go() -> None:
    sharding = Sharding(ranks=8, stage=3, offload_optimizer=True, offload_parameters=True)
    run = grpo_70b(sharding=sharding)
    numbers = run.policy.parameters / 8
    assert optimizer_seconds(run) == pytest.approx(4 * numbers * (28 / 50e9 + 4 / 20e9))
    here = dataclasses.replace(run, sharding=dataclasses.replace(sharding, offload_parameters=False))
    fetched = run.micro_batches * 2 * 2 * numbers / 20e9 * 0.5
    assert communication_seconds(run) - communication_seconds(here) == pytest.approx(fetched)


def test_engines_that_apply_adapters_are_sent_nothing_else() -> None:
    shape = model_shape(CONFIGS["llama"], lora=LoRA(rank=4))
    whole, matrices = (grpo_70b(policy=shape, engine=EngineShape(takes_adapter=takes)) for takes in (False, True))
    ratio = weight_sync_seconds(matrices) / weight_sync_seconds(whole)
    assert ratio == pytest.approx(shape.adapters / shape.parameters)


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
