"""``estimate`` from modules, data, callbacks and strategies; coarse times; the warning before training."""

import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from rich.console import Console
from tiny_models import tiny_model

import rlhfkit
from rlhfkit import (
    Ahead,
    CriticPool,
    DistillationModule,
    DPOModule,
    Episodes,
    GRPOModule,
    LocalEngine,
    ModelPool,
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
from rlhfkit.callbacks import SharedDevices
from rlhfkit.costs import GPU, MemoryCheck, estimate
from rlhfkit.costs.description import sharding_of
from rlhfkit.costs.estimation import estimate_run, forward_flops, memory_warning, train_flops
from rlhfkit.costs.memory import TRAINING
from rlhfkit.costs.model_shape import model_shape
from rlhfkit.costs.run import Sharding
from rlhfkit.models import ModelLoading, load_causal_lm
from rlhfkit.models.lora import save_adapter
from rlhfkit.modules.parts import Critic, Reference, RewardModel
from rlhfkit.strategies import SequenceParallelDDPStrategy

from .shapes import CONFIGS, grpo_70b, llama_70b


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


def rollouts(*, max_new_tokens: int = 32, **changes: Any) -> RolloutCallback:
    sampling = SamplingSpec(group_size=4, max_new_tokens=max_new_tokens)
    return RolloutCallback(**{"reward": lambda samples: [1.0 for _ in samples], "sampling": sampling} | changes)


def roles(found: Any) -> set[str]:
    return {part.role for part in found.memory} - {"process", "all models"}


def test_grpo_from_its_objects(folder: str) -> None:
    found = estimate(GRPOModule(folder), prompts(), rollouts(), gpu="a100", strategy="rlhf_zero2", devices=2)
    assert roles(found) == {"policy", "engine"}
    assert found.run.sharding.stage == 2
    assert found.run.sequences == 32
    assert found.run.longest == 48
    assert found.run.engine is not None
    assert found.run.engine.local
    assert found.first_problem is None
    assert "every answer has 32 tokens, the limit: give answer_tokens for their mean" in found.assumptions


ROLES: dict[str, tuple[Callable[[str], Any], set[str]]] = {
    "PPO": (PPOModule, {"policy", "engine", "critic", "reference"}),
    "PPO that shares": (lambda model: PPOModule(model, parts=[Critic(shared=True)], kl_coef=0.0), {"policy", "engine"}),
    "DPO": (DPOModule, {"policy", "reference"}),
    "DPO, precomputed": (lambda model: DPOModule(model, precompute_ref_log_probs=True), {"policy"}),
    "distillation": (lambda model: DistillationModule(model, teacher=model), {"policy", "teacher"}),
    "distillation, precomputed": (
        lambda model: DistillationModule(model, teacher=model, top_k=4, precompute_teacher=True),
        {"policy"},
    ),
}


@pytest.mark.parametrize("case", ROLES)
def test_models_are_held_unless_they_share_or_are_precomputed(folder: str, case: str) -> None:
    make, expected = ROLES[case]
    module = make(folder)
    given = (prompts(), rollouts()) if isinstance(module, PPOModule) else ()
    assert roles(estimate(module, *given)) == expected


def test_adapters_need_no_reference_and_a_small_optimizer(folder: str) -> None:
    """They are their own reference, whose forward passes take time."""
    lora = rlhfkit.LoRA(rank=2)
    found = estimate(GRPOModule(folder, lora=lora, kl_coef=0.1), prompts(), rollouts(), strategy="rlhf_zero0")
    assert "reference" not in roles(found)
    (optimizer,) = (part.bytes for part in found.memory if part.part == "optimizer")
    assert optimizer == 12 * found.run.policy.adapters
    free = estimate(GRPOModule(folder, lora=lora, kl_coef=0.0), prompts(), rollouts(), strategy="rlhf_zero0")
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


def test_the_policy_is_what_is_trained_of_the_model(wide: str) -> None:
    loading, lora = ModelLoading(quantization="nf4"), rlhfkit.LoRA(rank=2, targets=("self_attn.q_proj",))
    found = estimate(SFTModule(wide, lora=lora, loading=loading)).run.policy
    assert found == model_shape(wide, lora=lora, quantization="nf4")
    assert found.adapters == 2 * 2 * (128 + 128)  # the name is a part of those of the layers
    with pytest.raises(ValueError, match="LlamaForCausalLM has no linear layers of these names"):
        estimate(SFTModule(wide, lora=rlhfkit.LoRA(targets=("qkv",))))
    assert estimate(RewardModule(wide)).run.policy == model_shape(wide).with_scalar_head() != model_shape(wide)


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({}, False),
        ({"engine": LocalEngine(share_weights=False)}, True),
        ({"parts": [Ahead(1)]}, True),
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
    of_callback = {name: value for name, value in changes.items() if name in ("engine", "parts")}
    of_trainer = {name: value for name, value in changes.items() if name in ("strategy", "precision")}
    module = GRPOModule(folder, lora=changes.get("lora"))
    found = estimate(module, prompts(), rollouts(**of_callback), **of_trainer)
    (weights,) = (part.bytes for part in found.memory if (part.role, part.part) == ("engine", "weights"))
    assert weights == (2 * found.run.policy.parameters if copies else 0)


def test_a_micro_batch_has_its_rows_or_the_tokens_of_its_ranks(folder: str) -> None:
    def tokens(*described: Any, **options: Any) -> float:
        return estimate(*described, **options).run.micro_batch_tokens

    capped = prompts(max_tokens_per_micro_batch=64, micro_batch_size=None)
    own, group = GRPOModule(folder), RLHFDeepSpeedStrategy(stage=2, sequence_parallel_size=2)
    assert tokens(own, prompts(), rollouts(), strategy=group, devices=4) == 8 * (32 + 16 / 4)  # a prompt for four
    assert tokens(own, capped, rollouts()) == 64
    assert tokens(own, capped, rollouts(), strategy=group, devices=4) == 2 * 64
    assert tokens(own, capped, rollouts(max_new_tokens=100)) == 116  # which is never divided
    texts = {"data": [{"text": "1+1=2"}], "max_length": 64}
    assert tokens(SFTModule(folder), SFTDataModule(**texts, micro_batch_size=4)) == 4 * 64
    assert tokens(SFTModule(folder), SFTDataModule(**texts, max_tokens_per_micro_batch=128)) == 128
    pairs = PreferenceDataModule([dict.fromkeys(("prompt", "chosen", "rejected"), "a")], max_length=64)
    assert tokens(DPOModule(folder), pairs) == 2 * pairs.micro_batch_size * 64
    step = estimate(SFTModule(folder), SFTDataModule(**texts, micro_batch_size=4), devices=2, accumulate_grad_batches=3)
    assert step.run.sequences == 2 * 3 * 4


def test_a_pool_keeps_its_sizes_inside_wrappers(wide: str) -> None:
    pool = VLLMPool(2, 2, pipeline_parallel_size=2, colocate=True, sleep_level=1, engine_arguments={"max_num_seqs": 64})
    engine = estimate(
        GRPOModule(wide), prompts(), rollouts(engine=pool, group=Episodes(environment=lambda prompt: None)), devices=4
    ).run.engine
    assert engine is not None
    assert (engine.count, engine.tensor_parallel, engine.pipeline_parallel, engine.max_sequences) == (2, 2, 2, 64)
    assert engine.colocated
    assert engine.memory_share == 0.5


def test_training_states_leave_the_gpus_of_colocated_engines_unless_told_otherwise(wide: str) -> None:
    pool = VLLMPool(colocate=True)
    for given, expected in ((None, True), (False, False)):
        callback = rollouts(engine=pool, parts=[SharedDevices(given)])
        assert estimate(GRPOModule(wide), prompts(), callback).run.offload_training is expected
    assert not estimate(GRPOModule(wide), prompts(), rollouts()).run.offload_training


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("auto", Sharding(ranks=4)),
        ("rlhf_zero0", Sharding(ranks=4, stage=0)),
        ("rlhf_zero2_offload", Sharding(ranks=4, stage=2, offload_optimizer=True)),
        ("rlhf_zero3_offload", Sharding(ranks=4, stage=3, offload_optimizer=True, offload_parameters=True)),
        # Made in the test: it imports DeepSpeed, which no other file needs while tests are collected.
        (
            lambda: RLHFDeepSpeedStrategy(stage=1, reduce_bucket_size=5, sequence_parallel_size=2),
            Sharding(ranks=4, stage=1, bucket=5, sequence=2),
        ),
        (lambda: SequenceParallelDDPStrategy(4), Sharding(ranks=4, sequence=4)),
    ],
)
def test_strategies_are_known_by_name_and_as_objects(strategy: Any, expected: Sharding) -> None:
    assert sharding_of(strategy() if callable(strategy) else strategy, 4) == expected


@pytest.mark.parametrize(("own", "machines"), [({"num_nodes": 4}, 4), ({}, 2)])
def test_machines_of_the_strategy_go_before_those_of_the_trainer(folder: str, own: Any, machines: int) -> None:
    strategy = RLHFDeepSpeedStrategy(stage=3, launcher="ray", **own)
    found = estimate(SFTModule(folder), strategy=strategy, devices=2, num_nodes=2)
    assert found.run.sharding.ranks == found.run.gpus == 2 * machines


def test_a_report_is_a_table_and_json() -> None:
    given: dict[str, Any] = {"assumptions": ["answers have 4096 tokens"], "problems": ["sizes that do not divide"]}
    found = estimate_run(grpo_70b(gradient_checkpointing=False), **given)
    assert found.first_problem == "sizes that do not divide", "then what does not fit"
    assert found.problems[1].startswith("training GPU, train: ")
    console = Console(width=200, file=io.StringIO())
    console.print(found.table())
    assert "GPUs in all: 320, 256 of them for training." in console.file.getvalue()  # 16 engines of 4 have their own
    read = json.loads(json.dumps(found.to_dict()))
    assert read["first_problem"] == found.first_problem
    assert read["peak"][TRAINING] == found.peak[TRAINING]
    assert sum(part["bytes"] for part in read["memory"]) == sum(part.bytes for part in found.memory)


def test_sizes_that_contradict_are_problems(folder: str) -> None:
    for data, callback, devices, problem in (
        (prompts(rollout_batch_size=7), rollouts(), 3, "rollout_batch_size"),
        (prompts(), rollouts(max_new_tokens=600), 1, "exceed the model's context of 512"),
        (prompts(), rollouts(engine=VLLMPool(1, 3)), 1, "tensor_parallel_size=3 must divide its"),
    ):
        assert problem in str(estimate(GRPOModule(folder), data, callback, devices=devices).first_problem)


def test_several_models_of_a_kind_are_counted_each_where_it_is(folder: str) -> None:
    teachers = {"math": folder, "code": folder, "rest": folder}
    found = estimate(OnPolicyDistillationModule(folder, teacher=teachers), prompts(), rollouts())
    assert {"teacher", "teacher 1", "teacher 2"} <= roles(found)
    pool = ModelPool(folder, num_replicas=2, resources={"GPU": 2})
    parts = [RewardModel({"a": folder, "b": ModelPool(folder), "c": folder}), Reference(pool)]
    module = GRPOModule(folder, kl_coef=0.1, parts=parts)
    found = estimate(module, prompts(), rollouts(engine=VLLMPool(), reward=None))
    held = {part.role: part.bytes for part in found.memory if part.place == TRAINING and part.part == "weights"}
    assert held["reward model a"] == held["reward model c"] == pytest.approx(2 * held["policy"] / 2, rel=0.2)
    assert {"reward model b GPU", "reference GPU"} <= set(found.peak)
    assert found.to_dict()["gpus"] == found.run.gpus == 1 + 1 + 1 + 4


def test_a_critic_in_a_pool_has_its_gpus_and_its_bytes_there(folder: str) -> None:
    frozen = ModelPool(folder, resources={"GPU": 2})
    trained = CriticPool(num_ranks=2, strategy="rlhf_zero3")
    for critic, has_optimizer in ((frozen, False), (trained, True)):
        found = estimate(PPOModule(folder, kl_coef=0, critic=critic), prompts(), rollouts(engine=VLLMPool()))
        assert found.run.critic is None
        assert found.run.gpus == 1 + 1 + 2
        parts = {part.part: part.bytes for part in found.memory if part.place == "critic GPU"}
        shape = found.run.policy.with_scalar_head()
        assert parts["weights"] == pytest.approx(found.run.precision.weights * shape.parameters / 2, rel=0.01)
        assert ("optimizer" in parts) == has_optimizer


# ------------------------------------------------------------------------------------------------ coarse times


def test_operations_are_those_of_the_papers() -> None:
    """2 P a token, 6 P with a backward pass, and causal attention of half the length (arXiv:2001.08361)."""
    shape = llama_70b()
    assert forward_flops(shape, 1, 0) == 2 * shape.active
    attention = forward_flops(shape, 1, 1000) - forward_flops(shape, 1, 0)
    assert attention == 4 * 80 * 8192 * 500  # two products of 80 layers, 64 heads of 128, 500 tokens in the mean
    passes = [train_flops(shape, 1, 0, gradient_checkpointing=on) / forward_flops(shape, 1, 0) for on in (False, True)]
    assert passes == [3, 4]


def test_times_are_within_a_factor_of_two_of_a_published_run() -> None:
    """Llama 3.1 70B, 2,048 H100s: 41 % of peak (Llama 3 report, arXiv:2407.21783, table 4), without recomputing."""
    run = grpo_70b(engine=None, gradient_checkpointing=False, prompt_tokens=8192.0, answer_tokens=0.0, sequences=2048)
    seconds = estimate_run(run).seconds["train"]
    published = 6 * 70.55e9 * run.tokens / (256 * 989e12 * 0.41)
    assert published / 2 < seconds < published * 2


def test_shorter_answers_take_less_time_and_sampling_ahead_the_longer_side() -> None:
    base, ahead = estimate_run(grpo_70b()), estimate_run(grpo_70b(max_staleness=1))
    assert estimate_run(grpo_70b(answer_tokens=1000.0)).seconds["generate"] < base.seconds["generate"]
    learning = base.seconds["prepare"] + base.seconds["train"]
    assert base.iteration_seconds == pytest.approx(base.seconds["generate"] + learning)
    assert ahead.iteration_seconds == pytest.approx(max(base.seconds["generate"], learning))


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "given", "allowed"),
    [
        ({"gpu": "H1000"}, "H1000", "A100-40GB, A100, H100"),
        ({"devices": 0}, "0", "devices"),
        ({"strategy": "fsdp"}, "fsdp", "auto, ddp, single_device, rlhf_zero0"),
        ({"answer_tokens": -1.0}, "-1.0", "above 0"),
        ({"data": None}, "GRPOModule", "PromptDataModule"),
        ({"strategy": SequenceParallelDDPStrategy(2), "devices": 3}, "3", "which does not divide the 3 rank"),
    ],
)
def test_bad_arguments_are_refused(folder: str, arguments: dict[str, Any], given: str, allowed: str) -> None:
    fields = {"data": prompts(), "rollouts": rollouts()} | arguments
    with pytest.raises(ValueError, match=given) as refused:
        estimate(GRPOModule(folder), **fields)
    assert allowed in str(refused.value)
    with pytest.raises(ValueError, match=r"GPU.bandwidth .* 0"):
        GPU("mine", 1.0, 1.0, 0.0)


# ------------------------------------------------------------------------------------------------ before training


def trainer_of(module: Any, data: Any, *callbacks: Any, **arguments: Any) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[*callbacks], **arguments
    )
    trainer.datamodule = data  # type: ignore[attr-defined]  # as trainer.fit sets it
    return trainer


@pytest.mark.parametrize("module", [SFTModule, GRPOModule])
def test_the_fullest_phase_is_compared_with_the_free_memory(folder: str, module: Any) -> None:
    made = module(folder)
    given: list[Any] = [SFTDataModule([{"prompt": "1+1=", "completion": "2"}])]
    given = given if module is SFTModule else [prompts(), rollouts()]
    options: dict[str, Any] = {"strategy": RLHFDeepSpeedStrategy(stage=2), "devices": 4, "precision": "bf16-true"}
    trainer = trainer_of(made, *given, **options)
    peak = estimate(made, *given, gpu=GPU("toy", 1e12, 1.0, 1.0), **options).peak[TRAINING]
    assert memory_warning(trainer, made, "toy", peak / 0.85) is None
    near, far = (str(memory_warning(trainer, made, "toy", peak / share)) for share in (0.95, 1.3))
    for said in ("toy", "95%", "process: CUDA and NCCL 1.5 GiB"):
        assert said in near
    assert near.split("toy")[0] != far.split("toy")[0]  # it may not fit, and will probably not


def test_what_cannot_be_estimated_and_cpus_are_not_warned_of(folder: str) -> None:
    module = GRPOModule(folder)
    trainer = trainer_of(module, None)
    assert memory_warning(trainer, module, "toy", 1.0) is None  # the run fails on its own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MemoryCheck().setup(trainer, module, "fit")
