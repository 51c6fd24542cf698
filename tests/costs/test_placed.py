"""Models on GPUs of their own: their bytes, their seconds, and what of these other work hides.

Covers described_roles.py and memory/placed.py.
"""

import dataclasses
from typing import Any

import pytest

from rlhfkit import (
    CriticPool,
    GRPOModule,
    ModelPool,
    PPOModule,
    PromptDataModule,
    RolloutCallback,
    SamplingSpec,
    VLLMPool,
    estimate,
)
from rlhfkit.costs import PlacedModel, Run, Sharding, estimate_run
from rlhfkit.costs.memory.parts import TRAINING, phase_bytes
from rlhfkit.costs.memory.placed import critic_run, placed_parts, placed_problems, places
from rlhfkit.costs.memory.whole_run import memory_parts
from rlhfkit.costs.run import PlacedRole
from rlhfkit.costs.seconds import (
    critic_seconds,
    exposed_seconds,
    forward_flops,
    generation_seconds,
    iteration_seconds,
    phase_seconds,
    placed_seconds,
    prepare_seconds,
    train_seconds,
)

from .shapes import grpo_70b, llama_70b


def placed(role: PlacedRole = "reference", replicas: int = 1, gpus: int = 4) -> PlacedModel:
    return PlacedModel(role=role, shape=llama_70b(), replicas=replicas, gpus=gpus)


def test_a_model_has_its_bytes_once_here_or_there() -> None:
    run = grpo_70b(reference=None, placed=(placed(),))
    parts = placed_parts(run)
    assert places(parts) == ["reference GPU"]
    weights = sum(part.bytes for part in parts if part.part == "weights")
    assert weights == pytest.approx(2 * llama_70b().parameters / 4)
    held, apart = (phase_bytes(memory_parts(one), TRAINING) for one in (grpo_70b(reference=llama_70b()), run))
    assert held["prepare"] - apart["prepare"] == pytest.approx(2 * llama_70b().parameters / run.sharding.shards)
    with pytest.raises(ValueError, match="leave one of them out"):
        grpo_70b(reference=llama_70b(), placed=(placed(),))


def test_what_does_not_fit_is_a_problem() -> None:
    run = grpo_70b(reference=None, placed=(placed(gpus=1),))
    (problem,) = placed_problems(run, placed_parts(run))
    assert "the reference needs 1" in problem
    assert "shard it over more" in problem
    assert problem in estimate_run(run).problems


def test_seconds_are_those_of_the_ranks_on_as_many_gpus() -> None:
    run = grpo_70b(reference=None, placed=(placed(replicas=2),))
    expected = forward_flops(llama_70b(), run.tokens, run.sequence_tokens)
    expected /= 8 * run.gpu.flops * run.efficiency.forward_flops
    assert placed_seconds(run) == {"reference": pytest.approx(expected)}
    assert run.gpus == grpo_70b(reference=None).gpus + 8


def test_engines_and_old_log_probs_hide_a_reference_and_a_slow_one_costs_the_rest() -> None:
    fast = grpo_70b(reference=None, placed=(placed(replicas=64),), old_logprobs=True, asked_by_group=True)
    assert exposed_seconds(fast)["reference"] == 0
    slow = dataclasses.replace(fast, placed=(placed(replicas=1, gpus=1),))
    rest = placed_seconds(slow)["reference"] - generation_seconds(slow) - prepare_seconds(slow)
    assert exposed_seconds(slow)["reference"] == pytest.approx(max(rest, 0))
    assert phase_seconds(slow)["placed_models"] == exposed_seconds(slow)["reference"]
    assert estimate_run(fast).hidden == {"reference": 1.0}
    late = dataclasses.replace(slow, asked_by_group=False)
    assert exposed_seconds(late)["reference"] == pytest.approx(
        max(0, placed_seconds(late)["reference"] - prepare_seconds(late))
    )


def test_of_a_reward_model_the_last_groups_are_never_hidden() -> None:
    run = grpo_70b(reward_model=None, placed=(placed("reward model", replicas=4),), asked_by_group=True)
    last = placed_seconds(run)["reward model"] * run.prepare_tokens * 4 / run.tokens
    assert exposed_seconds(run)["reward model"] == pytest.approx(last)
    assert phase_seconds(run)["score"] == pytest.approx(run.score_seconds + last)
    late = dataclasses.replace(run, asked_by_group=False)
    assert exposed_seconds(late) == placed_seconds(late)


def test_a_critic_learns_while_the_policy_does() -> None:
    run = grpo_70b(critic=None, placed=(placed("critic", gpus=32),))
    assert critic_seconds(run, run.placed[0]) == pytest.approx(train_seconds(run) * run.sharding.ranks / 32, rel=0.05)
    rest = critic_seconds(run, run.placed[0]) - train_seconds(run)
    assert exposed_seconds(run)["critic"] >= max(rest, 0)
    alone = critic_run(run, run.placed[0])
    assert alone.sharding == Sharding(ranks=32, stage=3)
    there = phase_bytes(placed_parts(run), "critic GPU")
    assert there == pytest.approx(phase_bytes(memory_parts(alone), TRAINING))


def test_sampling_ahead_takes_as_long_as_the_slowest() -> None:
    run = grpo_70b(reference=None, placed=(placed(gpus=1),), max_staleness=1, asked_by_group=True)
    assert iteration_seconds(run) == placed_seconds(run)["reference"] > generation_seconds(run)


def test_pools_of_a_module_are_described(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tiny_models import tiny_model

    folder = str(tiny_model(tmp_path_factory.mktemp("model")))
    pool = ModelPool(folder, num_replicas=2, resources={"GPU": 2})
    module = GRPOModule(folder, kl_coef=0.1, reference=pool)
    data = PromptDataModule("prompts.jsonl", rollout_batch_size=8, micro_batch_size=8)
    rollouts = RolloutCallback(lambda _: [], engine=VLLMPool(), sampling=SamplingSpec(group_size=8))
    found = estimate(module, data, rollouts)
    assert found.run.placed == (PlacedModel(role="reference", shape=found.run.policy, replicas=2, gpus=2),)
    assert found.to_dict()["gpus"] == 1 + 1 + 4
    assert "reference GPU" in found.peak
    of_critic: dict[str, CriticPool | ModelPool] = {
        "frozen critic": ModelPool(folder, ranks_per_replica=2, resources={"GPU": 1}),
        "critic": CriticPool(num_ranks=2, strategy="rlhf_zero3"),
    }
    for role, critic in of_critic.items():
        found = estimate(PPOModule(folder, kl_coef=0, critic=critic), data, rollouts)
        assert found.run.critic is None
        assert [(one.role, one.gpus) for one in found.run.placed] == [(role, 2)]
        weights = [part.bytes for part in placed_parts(found.run) if part.part == "weights"]
        assert weights == [pytest.approx(found.run.precision.weights * found.run.policy.backbone / 2, rel=0.01)]


def test_a_critics_own_ranks_have_their_stage_types_and_optimizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tiny_models import tiny_model

    folder = str(tiny_model(tmp_path_factory.mktemp("model")))
    data = PromptDataModule("prompts.jsonl", rollout_batch_size=8, micro_batch_size=8)
    rollouts = RolloutCallback(lambda _: [], engine=VLLMPool(), sampling=SamplingSpec(group_size=8))

    def critic_bytes(**arguments: Any) -> dict[str, float]:
        found = estimate(PPOModule(folder, kl_coef=0, critic=CriticPool(num_ranks=2, **arguments)), data, rollouts)
        parts = [part for part in found.memory if part.place == "critic GPU"]
        return {name: sum(part.bytes for part in parts if part.part == name) for name in ("weights", "optimizer")}

    plain, sharded = critic_bytes(), critic_bytes(strategy="rlhf_zero3")
    assert plain["weights"] == pytest.approx(2 * sharded["weights"])
    assert plain["optimizer"] == sharded["optimizer"]
    without_moments = critic_bytes(optimizer="sgd")
    assert without_moments["optimizer"] == pytest.approx(plain["optimizer"] / 3)  # main weights alone are left
    assert critic_bytes(precision="32-true")["weights"] == 2 * plain["weights"]


def test_each_of_several_reward_models_is_counted_where_it_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    from tiny_models import tiny_model

    folder = str(tiny_model(tmp_path_factory.mktemp("model")))
    data = PromptDataModule("prompts.jsonl", rollout_batch_size=8, micro_batch_size=8)
    rollouts = RolloutCallback(engine=VLLMPool(), sampling=SamplingSpec(group_size=8))
    rewards = {"a": folder, "b": ModelPool(folder), "c": folder, "d": ModelPool(folder, num_replicas=2)}
    found = estimate(GRPOModule(folder, reward_model=rewards), data, rollouts)
    held = {part.role: part.bytes for part in found.memory if part.place == TRAINING and part.part == "weights"}
    assert held["reward model"] == held["reward model 2"] == pytest.approx(2 * found.run.policy.backbone)
    assert places(found.memory) == ["reward model b GPU", "reward model d GPU"]
    assert found.run.gpus == 1 + 1 + 1 + 2
    one = estimate(GRPOModule(folder, reward_model=folder), data, rollouts)
    assert found.seconds["prepare"] > one.seconds["prepare"]
    exposed = exposed_seconds(found.run)
    assert found.seconds["score"] == pytest.approx(exposed["reward model b"] + exposed["reward model d"])
    twice = (placed("reward model"), placed("reward model"))
    with pytest.raises(ValueError, match="several models of one role and name"):
        grpo_70b(placed=twice)


@pytest.mark.parametrize(
    ("change", "name"), [({"replicas": 0}, "replicas"), ({"gpus": 0}, "gpus"), ({"role": "x"}, "role")]
)
def test_numbers_are_checked(change: dict[str, object], name: str) -> None:
    arguments = {"role": "reference", "shape": llama_70b()} | change
    with pytest.raises(ValueError, match=f"PlacedModel.{name}"):
        PlacedModel(**arguments)  # type: ignore[arg-type]


def test_a_run_without_placed_models_is_as_before() -> None:
    run: Run = grpo_70b()
    assert placed_parts(run) == []
    assert exposed_seconds(run) == {}
    assert "placed_models" not in phase_seconds(run)
