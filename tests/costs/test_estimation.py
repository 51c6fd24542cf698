"""``estimate`` from what users have: modules, data, callbacks, strategies.

Covers description.py.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_models import tiny_model

import rlhfkit
from rlhfkit import (
    DistillationModule,
    DPOModule,
    EpisodeEngine,
    GRPOModule,
    LocalEngine,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    RewardModule,
    RLHFDeepSpeedStrategy,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
    VLLMPool,
)
from rlhfkit.costs import GPU, estimate, estimate_run
from rlhfkit.costs.description import sharding_of
from rlhfkit.costs.hardware import GIB
from rlhfkit.costs.memory.parts import TRAINING
from rlhfkit.costs.seconds import prepare_seconds, train_seconds
from rlhfkit.strategies import SequenceParallelDDPStrategy

from .shapes import CONFIGS, grpo_70b


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with a tokenizer."""
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a small model, without weights."""
    place = tmp_path_factory.mktemp("wide")
    CONFIGS["llama"].save_pretrained(place)
    return str(place)


def prompts(**changes: Any) -> PromptDataModule:
    arguments: dict[str, Any] = {"rollout_batch_size": 8, "micro_batch_size": 8, "max_prompt_length": 16}
    return PromptDataModule([{"prompt": "1+1="}], **(arguments | changes))


def rollouts(**changes: Any) -> RolloutCallback:
    arguments: dict[str, Any] = {"sampling": SamplingSpec(group_size=4, max_new_tokens=32)}
    return RolloutCallback(lambda samples: [1.0 for _ in samples], **(arguments | changes))


def roles(found: Any) -> set[str]:
    return {part.role for part in found.memory} - {"process", "iteration", "all models"}


def test_it_is_a_public_name() -> None:
    assert rlhfkit.estimate is estimate


def test_grpo_from_its_objects(folder: str) -> None:
    found = estimate(GRPOModule(folder), prompts(), rollouts(), gpu="a100", strategy="rlhf_zero2", devices=2)
    assert roles(found) == {"policy", "engine"}
    assert found.run.sharding.stage == 2
    assert found.run.sequences == 32
    assert found.run.updates == 2
    assert found.run.longest == 48
    assert found.run.engine is not None
    assert found.run.engine.local
    assert found.first_problem is None
    assert "every answer has 32 tokens, the limit: give answer_tokens for their mean" in found.assumptions
    assert set(found.seconds) >= {"generate", "prepare", "train", "weight_sync"}
    assert found.iteration_seconds == pytest.approx(sum(found.seconds.values()))


def test_ppo_has_a_critic_and_a_reference_unless_they_share(folder: str) -> None:
    assert {"critic", "reference"} <= roles(estimate(PPOModule(folder), prompts(), rollouts()))
    shared = PPOModule(folder, shared_backbone=True, kl_coef=0.0)
    assert roles(estimate(shared, prompts(), rollouts())) == {"policy", "engine"}


def test_adapters_need_no_reference_and_a_small_optimizer(folder: str) -> None:
    lora = rlhfkit.LoRA(rank=2)
    found = estimate(GRPOModule(folder, lora=lora, kl_coef=0.1), prompts(), rollouts(), strategy="rlhf_zero0")
    assert "reference" not in roles(found)
    (optimizer,) = (part.bytes for part in found.memory if part.part == "optimizer")
    assert optimizer == 12 * found.run.policy.adapters


def test_offline_modules_need_no_callback(folder: str) -> None:
    data = SFTDataModule([{"text": "1+1=2"}], max_length=64, micro_batch_size=4)
    found = estimate(SFTModule(folder), data, devices=2, strategy="rlhf_zero1", accumulate_grad_batches=3)
    assert roles(found) == {"policy"}
    assert found.run.micro_batch_tokens == 4 * 64
    assert found.run.sequences == 2 * 3 * 4
    assert found.run.micro_batches == 3
    capped = SFTDataModule([{"text": "1+1=2"}], max_length=64, max_tokens_per_micro_batch=128)
    assert estimate(SFTModule(folder), capped).run.micro_batch_tokens == 128


def test_pairs_have_two_sequences_and_a_reference(folder: str) -> None:
    data = PreferenceDataModule([{"prompt": "a", "chosen": "b", "rejected": "c"}], max_length=64, micro_batch_size=4)
    found = estimate(DPOModule(folder), data)
    assert roles(found) == {"policy", "reference"}
    assert found.run.micro_batch_tokens == 8 * 64
    assert roles(estimate(DPOModule(folder, precompute_ref_log_probs=True), data)) == {"policy"}


def test_a_teacher_is_held_unless_it_is_precomputed(folder: str) -> None:
    assert roles(estimate(DistillationModule(folder, teacher=folder))) == {"policy", "teacher"}
    cached = DistillationModule(folder, teacher=folder, top_k=4, precompute_teacher=True)
    assert roles(estimate(cached)) == {"policy"}


def test_a_reward_model_has_no_output_layer(folder: str) -> None:
    found = estimate(RewardModule(folder))
    assert "logits head" not in {part.part for part in found.memory}


def test_a_configuration_and_a_name_stand_for_a_module(folder: str) -> None:
    configured = {"class_path": "rlhfkit.GRPOModule", "init_args": {"model": folder, "gradient_checkpointing": True}}
    assert estimate(configured, prompts(), rollouts()).run.gradient_checkpointing
    assert roles(estimate(folder)) == {"policy"}


def test_a_pool_keeps_its_sizes_inside_wrappers(wide: str) -> None:
    pool = VLLMPool(2, 2, pipeline_parallel_size=2, colocate=True, sleep_level=1, engine_arguments={"max_num_seqs": 64})
    engine = estimate(
        {"class_path": "GRPOModule", "init_args": {"model": wide}},
        prompts(),
        rollouts(engine=EpisodeEngine(pool, environment=lambda prompt: None)),
        devices=4,
    ).run.engine
    assert engine is not None
    assert (engine.count, engine.tensor_parallel, engine.pipeline_parallel, engine.max_sequences) == (2, 2, 2, 64)
    assert engine.colocated
    assert engine.sleeping_weights_on_host
    assert engine.memory_share == 0.5


def test_training_states_leave_the_gpus_of_colocated_engines_unless_told_otherwise(wide: str) -> None:
    pool = VLLMPool(colocate=True)
    for given, expected in ((None, True), (False, False)):
        callback = rollouts(engine=pool, offload_training=given)
        assert estimate(GRPOModule(wide), prompts(), callback).run.offload_training is expected
    assert not estimate(GRPOModule(wide), prompts(), rollouts()).run.offload_training


def test_the_cap_of_a_micro_batch_bounds_memory(folder: str) -> None:
    capped = prompts(max_tokens_per_micro_batch=64, micro_batch_size=None, updates_per_iteration=2)
    run = estimate(GRPOModule(folder), capped, rollouts()).run
    assert run.micro_batch_tokens == 64
    assert run.updates == 2
    longer = rollouts(sampling=SamplingSpec(group_size=4, max_new_tokens=100))
    assert estimate(GRPOModule(folder), capped, longer).run.micro_batch_tokens == 116


def test_epochs_over_an_iteration_train_as_often_and_old_log_probs_cost_a_pass_only_with_several_updates(
    folder: str,
) -> None:
    capped: dict[str, Any] = {"max_tokens_per_micro_batch": 64, "micro_batch_size": None}

    def seconds(updates: int, epochs: int) -> tuple[float, float]:
        data = prompts(**capped, updates_per_iteration=updates, epochs_per_iteration=epochs)
        run = estimate(GRPOModule(folder), data, rollouts()).run
        return prepare_seconds(run), train_seconds(run)

    assert seconds(1, 3)[0] == seconds(1, 1)[0] == 0.0
    assert seconds(2, 3)[0] == pytest.approx(2 * seconds(2, 1)[0])
    assert seconds(2, 3)[1] == pytest.approx(3 * seconds(2, 1)[1])


@pytest.mark.parametrize(
    ("strategy", "stage", "optimizer", "parameters"),
    [
        ("auto", None, False, False),
        ("rlhf_zero0", 0, False, False),
        ("rlhf_zero2_offload", 2, True, False),
        ("rlhf_zero3_offload", 3, True, True),
        (RLHFDeepSpeedStrategy(stage=1, reduce_bucket_size=5), 1, False, False),
    ],
)
def test_strategies_are_known_by_name_and_as_objects(
    strategy: Any, stage: int | None, optimizer: bool, parameters: bool
) -> None:
    found = sharding_of(strategy, 4)
    assert (found.stage, found.offload_optimizer, found.offload_parameters) == (stage, optimizer, parameters)
    assert found.ranks == 4
    assert found.bucket == (5 if isinstance(strategy, RLHFDeepSpeedStrategy) else 200_000_000)


def test_the_strategy_says_which_ranks_compute_together(folder: str) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=3, sequence_parallel_size=2, sequence_parallel="ring")
    found = sharding_of(strategy, 8)
    assert (found.sequence, found.sequence_parallel, found.tensor, found.data) == (2, "ring", 1, 4)
    plain = sharding_of(SequenceParallelDDPStrategy(4), 8)
    assert (plain.stage, plain.sequence, plain.data) == (None, 4, 2)
    with pytest.raises(ValueError, match="which does not divide the 3 rank"):
        estimate(SFTModule(folder), strategy=strategy, devices=3)


def test_micro_batches_of_a_group_have_its_rows_or_the_tokens_of_its_ranks(folder: str) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=2, sequence_parallel_size=2)
    module = GRPOModule(folder)
    run = estimate(module, prompts(), rollouts(), strategy=strategy, devices=4).run
    assert run.micro_batch_tokens == pytest.approx(8 * run.tokens / run.sequences)  # eight rows of a group
    assert run.updates == 2  # of 32 sequences, two groups take eight each
    capped = prompts(max_tokens_per_micro_batch=64, micro_batch_size=None)
    assert estimate(module, capped, rollouts(), strategy=strategy, devices=4).run.micro_batch_tokens == 128
    long = SFTDataModule([{"text": "1+1=2"}], max_length=200, max_tokens_per_micro_batch=64)
    (problem,) = estimate(SFTModule(folder), long, strategy=strategy, devices=2).problems
    assert "max_tokens_per_micro_batch=64 times sequence_parallel_size=2 is less than max_length=200" in problem


def test_what_several_ranks_cannot_compute_together_is_a_problem(folder: str, tmp_path: Path) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=2, sequence_parallel_size=2)
    found = estimate(SFTModule(folder, attention="eager"), strategy=strategy, devices=2)
    assert "attention='eager' is not supported where several ranks" in str(found.first_problem)
    divided = RLHFDeepSpeedStrategy(stage=0, tensor_parallel_size=2)
    assert "at stage 0 is not supported in 16 bits" in str(
        estimate(SFTModule(folder), strategy=divided, devices=2).first_problem
    )
    CONFIGS["mixtral"].save_pretrained(tmp_path)
    mixture = SFTModule(str(tmp_path), router_aux_loss_coef=0.01)
    assert estimate(mixture, strategy=strategy, devices=2).problems == []


def test_plain_values_do_as_well() -> None:
    found = estimate_run(grpo_70b())
    assert found.first_problem is None
    assert found.cached_sequences is not None
    assert 20 < found.cached_sequences < 200
    assert found.peak[TRAINING] < 80 * GIB


def test_what_does_not_fit_is_said_first_and_in_order() -> None:
    found = estimate_run(grpo_70b(gradient_checkpointing=False), problems=["sizes that do not divide"])
    assert found.first_problem == "sizes that do not divide"
    assert found.problems[1].startswith("train: ")


def test_a_report_is_a_table_and_json() -> None:
    found = estimate_run(grpo_70b(gradient_checkpointing=False), assumptions=["answers have 4096 tokens"])
    console = Console(width=200, file=io.StringIO())
    console.print(found.table())
    text = console.file.getvalue()
    for wanted in ("policy: activations", "total, train", "engine: key-value cache", "Does not fit: train", "Assumed:"):
        assert wanted in text
    read = json.loads(json.dumps(found.to_dict()))
    assert read["first_problem"] == found.first_problem
    assert read["peak"][TRAINING] == found.peak[TRAINING]
    assert sum(part["bytes"] for part in read["memory"]) == sum(part.bytes for part in found.memory)


def test_a_gpu_that_is_too_small_is_named(folder: str) -> None:
    small = GPU(name="watch", memory=1e6, flops=1e12, bandwidth=1e11, link=1e10)
    found = estimate(GRPOModule(folder), prompts(), rollouts(), gpu=small)
    assert found.first_problem is not None
    assert "a watch has 0.0 GiB" in found.first_problem


def test_sizes_that_contradict_are_problems(folder: str) -> None:
    uneven = estimate(GRPOModule(folder), prompts(rollout_batch_size=7), rollouts(), devices=3)
    assert "rollout_batch_size" in str(uneven.first_problem)
    long = rollouts(sampling=SamplingSpec(group_size=4, max_new_tokens=600))
    assert "exceed the model's context of 512" in str(estimate(GRPOModule(folder), prompts(), long).first_problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "H1000"}, "gpu must be one of A100-40GB, A100, H100"),
        ({"devices": 0}, "devices must be an integer of at least 1, got 0: say how many GPUs the run will have"),
        ({"strategy": "fsdp"}, "strategy must be one of auto, ddp, single_device, rlhf_zero0"),
        ({"answer_tokens": -1.0}, "answer_tokens must be a finite number above 0 or None, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(folder: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(GRPOModule(folder), prompts(), rollouts(), **arguments)


def test_what_is_missing_is_said(folder: str) -> None:
    with pytest.raises(ValueError, match=r"learns from its own samples: give estimate\(data=PromptDataModule"):
        estimate(GRPOModule(folder))
    with pytest.raises(ValueError, match="needs class_path and init_args, as in a configuration file, got the keys lr"):
        estimate({"lr": 1.0})
    with pytest.raises(TypeError, match="one of rlhfkit's modules or the name of a model, got LocalEngine"):
        estimate(LocalEngine())  # type: ignore[arg-type]
