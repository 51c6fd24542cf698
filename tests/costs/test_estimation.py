"""``estimate`` from what users have: modules, data, callbacks, strategies.

Covers description.py.
"""

import io
import json
from pathlib import Path
from typing import Any

import lightning as L
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
    OnPolicyDistillationModule,
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
from rlhfkit.models import load_causal_lm
from rlhfkit.models.lora import save_adapter
from rlhfkit.rewards.models import ModelReward
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


def test_adapters_are_their_own_reference_which_is_computed(folder: str) -> None:
    found = estimate(GRPOModule(folder, lora=rlhfkit.LoRA(), kl_coef=0.1), prompts(), rollouts())
    free = estimate(GRPOModule(folder, lora=rlhfkit.LoRA(), kl_coef=0.0), prompts(), rollouts())
    assert found.run.reference_is_policy
    assert found.seconds["prepare"] > free.seconds["prepare"]


def test_a_folder_with_an_adapter_is_its_base_model_and_the_adapter(folder: str, tmp_path: Path) -> None:
    model = load_causal_lm(folder, lora=rlhfkit.LoRA(rank=3))
    save_adapter(model, tmp_path, model.state_dict())
    fresh = estimate(GRPOModule(folder, lora=rlhfkit.LoRA(rank=3), kl_coef=0.1), prompts(), rollouts())
    loaded = estimate(GRPOModule(str(tmp_path), kl_coef=0.1), prompts(), rollouts())
    assert loaded.run.policy.adapters == fresh.run.policy.adapters > 0
    assert loaded.memory == fresh.memory
    assert "reference" not in roles(loaded)
    critic = estimate(PPOModule(str(tmp_path), kl_coef=0.0), prompts(), rollouts()).run.critic
    assert critic is not None
    assert critic.adapters == 0  # load_scalar_model makes the critic of the base model, and trains all of it


def test_frozen_weights_of_4_bits_are_small(wide: str) -> None:
    small, plain = (
        estimate(SFTModule(wide, lora=rlhfkit.LoRA(), quantization=quantization)) for quantization in ("nf4", None)
    )
    assert small.run.policy.quantized > 0.5 * small.run.policy.parameters
    assert small.peak[TRAINING] < plain.peak[TRAINING]


def test_targets_that_are_no_layers_are_refused_and_parts_of_names_found(wide: str) -> None:
    lora = rlhfkit.LoRA(rank=2, targets=("self_attn.q_proj",))
    assert estimate(SFTModule(wide, lora=lora)).run.policy.adapters == 2 * 2 * (128 + 128)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no linear layers of these names"):
        estimate(SFTModule(wide, lora=rlhfkit.LoRA(targets=("qkv",))))


def test_teachers_of_several_domains_are_all_held(folder: str) -> None:
    teachers = {"math": folder, "code": folder, "rest": folder}
    found = estimate(OnPolicyDistillationModule(folder, teacher=teachers), prompts(), rollouts())
    assert {"teacher", "teacher 2", "teacher 3"} <= roles(found)


def test_old_log_probs_are_computed_as_the_module_does(folder: str) -> None:
    data = prompts(rollout_batch_size=4)  # two updates

    def seconds(module: Any) -> float:
        run = estimate(module, data, rollouts()).run
        assert run.updates == 2
        return prepare_seconds(run)

    half = seconds(GRPOModule(folder))
    assert seconds(GRPOModule(folder, proximal="log-linear")) == 0
    assert seconds(GRPOModule(folder, token_filter={"top_entropy": 0.2})) == pytest.approx(2 * half)
    assert seconds(PPOModule(folder, shared_backbone=True, kl_coef=0.0)) == pytest.approx(2 * half)


def test_micro_batches_of_few_sequences_are_as_many_as_in_training(folder: str) -> None:
    run = estimate(GRPOModule(folder), prompts(micro_batch_size=2), rollouts(), answer_tokens=8).run
    assert run.micro_batches == 32 / 2
    assert run.tokens == 32 * (8 + 16 / 2)  # two sequences of a group share a prompt
    assert run.micro_batch_tokens == 48  # the longest


def test_what_is_in_no_formula_is_said(folder: str) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=3, engine_configs={"reference": {"zero_optimization": {"stage": 0}}})
    callback = RolloutCallback(ModelReward(folder), sampling=SamplingSpec(group_size=4, max_new_tokens=32))
    found = estimate(GRPOModule(folder, liger_kernels=True), prompts(), callback, strategy=strategy)
    said = "; ".join(found.assumptions)
    for wanted in ("engine_configs of reference change nothing", "liger_kernels save no memory", f"reward ({folder})"):
        assert wanted in said
    own = SFTData()
    assert "the sizes of a SFTData are not known" in "; ".join(estimate(SFTModule(folder), own).assumptions)


class SFTData(L.LightningDataModule):
    """A user's own."""


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, False),
        ({"engine": LocalEngine(share_weights=False)}, True),
        ({"max_staleness": 1}, True),
        ({"strategy": "rlhf_zero2"}, False),
        ({"strategy": "rlhf_zero3"}, True),
        ({"precision": "bf16-mixed"}, True),
        ({"lora": rlhfkit.LoRA()}, True),
    ],
)
def test_a_local_engine_has_weights_of_its_own_where_it_cannot_use_the_policys(
    folder: str, changes: dict[str, Any], copies: bool
) -> None:
    """The reasons are those of ``LocalEngine(share_weights=...)``."""
    of_callback = {name: value for name, value in changes.items() if name in ("engine", "max_staleness")}
    of_trainer = {name: value for name, value in changes.items() if name in ("strategy", "precision")}
    module = GRPOModule(folder, lora=changes.get("lora"))
    found = estimate(module, prompts(), rollouts(**of_callback), **of_trainer)
    (weights,) = (part.bytes for part in found.memory if (part.role, part.part) == ("engine", "weights"))
    assert weights == (2 * found.run.policy.parameters if copies else 0)


def test_engines_have_the_types_of_their_arguments(wide: str) -> None:
    def engine(**arguments: Any) -> Any:
        return estimate(GRPOModule(wide), prompts(), rollouts(engine=VLLMPool(**arguments))).run.engine

    assert not engine().quantized
    assert engine(quantization="fp8").quantized
    assert (engine().cache_itemsize, engine(engine_arguments={"kv_cache_dtype": "fp8_e4m3"}).cache_itemsize) == (
        None,
        1,
    )
    assert [engine(**one).takes_adapter for one in ({}, {"lora": "merge"}, {"colocate": True})] == [True, False, False]


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
    run = found.run
    assert run.engine is not None
    engines = run.engine.count * run.engine.tensor_parallel  # on GPUs of their own
    assert f"GPUs in all: {run.sharding.ranks + engines}, {run.sharding.ranks} of them for training." in text
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
