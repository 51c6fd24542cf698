"""A reward model that is a child of the module scores samples for selection, the curriculum, metrics and the loss."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from modules.on_policy.preparation.test_rewards import reward_model
from rl_runs import Iterations, additions, digits, fit_run, setup_run
from tiny_models import tiny_tokenizer

from rlhfkit import Ahead, DynamicSampling, LocalEngine, Prompt, RolloutCallback, Sample, SamplingSpec
from rlhfkit.datamodules.prompts.curriculum import ByColumn, BySuccess
from rlhfkit.modules.parts import RewardModel
from rlhfkit.rewards import ModelReward, WeightedSum
from rlhfkit.rollout import GroupSampler

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)


def above_zero(sample: Sample) -> float:
    """Whether the reward model likes it."""
    return float(sample.reward_parts["model"] > 0)


def test_dynamic_sampling_selects_by_the_scores_of_a_reward_model_among_the_children(tmp_path: Path) -> None:
    folder, seen = reward_model(tmp_path), [Iterations(), Iterations()]
    child, beside = (
        RolloutCallback(reward, sampling=SAMPLING, parts=[DynamicSampling(by=above_zero)])
        for reward in (None, WeightedSum(model=ModelReward(folder)))
    )
    fit_run(tmp_path, rollouts=beside, callbacks=[seen[0]])
    model = {"parts": [RewardModel(folder).plain()]}
    trainer, *_ = fit_run(tmp_path, rollouts=child, callbacks=[seen[1]], module_arguments=model)
    assert 0.0 < trainer.callback_metrics["rollout/accepted_fraction"] < 1.0
    assert trainer.callback_metrics["rollout/zero_advantage_fraction"] == 0.0
    for first in range(0, 32, 4):
        assert len({above_zero(sample) for sample in child.samples[first : first + 4]}) == 2
    assert seen[0].tokens == seen[1].tokens
    scores = ModelReward(folder)(child.samples)
    assert [sample.reward for sample in child.samples] == pytest.approx(scores, abs=1e-5)
    assert float(trainer.callback_metrics["rollout/reward"]) == pytest.approx(fmean(scores), abs=1e-5)


def sometimes(samples: Sequence[Sample]) -> list[float | None]:
    """Every other prompt has no score."""
    return [None if sample.prompt.index % 2 else 0.5 for sample in samples]


def test_validation_logs_the_scores_and_those_of_sources_and_parts_that_are_there(tmp_path: Path) -> None:
    held = [{"prompt": f"{i}+1=", "answer": "", "source": "easy" if i % 3 else "hard"} for i in range(7)]
    folder = reward_model(tmp_path)
    reward = WeightedSum({"digits": digits, "sometimes": sometimes}, missing="skip")
    trainer, module, data, rollouts = setup_run(
        tmp_path,
        module_arguments={"parts": [RewardModel(folder).plain()]},
        data_arguments={"validation_data": held},
        rollouts=RolloutCallback(reward, sampling=SAMPLING),
    )
    metrics = trainer.validate(module, data, verbose=False)[0]
    samples = rollouts.validation_samples
    scores = ModelReward(folder)(samples)
    assert metrics["val/model"] == pytest.approx(fmean(scores), abs=1e-5)
    assert metrics["val/sometimes"] == 0.5
    totals = [score + share for score, share in zip(scores, reward(samples), strict=True)]
    assert metrics["val/reward"] == pytest.approx(fmean(totals), abs=1e-5)
    hard = [total for total, sample in zip(totals, samples, strict=True) if sample.prompt.metadata["source"] == "hard"]
    assert metrics["val/reward/hard"] == pytest.approx(fmean(hard), abs=1e-5)


def test_a_curriculum_remembers_the_scores(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    seen: dict[int, float] = {}

    def remembered(one: Any) -> Any:
        seen.update({row: worth.reward for row, worth in one.history.items()})
        return one.rows

    fit_run(
        tmp_path,
        module_arguments={"parts": [RewardModel(folder).plain()]},
        data_arguments={"curriculum": remembered},
        rollouts=RolloutCallback(sampling=SAMPLING),
        max_epochs=6,  # of 40 prompts, 8 in each
    )
    assert len(seen) == 40
    assert all(seen.values())


def plain(samples: Sequence[Sample]) -> list[float]:
    return [0.0] * len(samples)


plain.name = "model"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rollouts", "data", "message"),
    [
        ({"parts": [DynamicSampling(by="math_match")]}, {}, "the parts are digits, model$"),
        ({"parts": [DynamicSampling(), Ahead(1)]}, {}, "thread beside training"),
        ({"parts": [Ahead(1)]}, {"curriculum": BySuccess()}, "thread beside training"),
        ({"reward": plain}, {}, "is called 'model'"),
    ],
    ids=["unknown part", "ahead", "ahead with a curriculum", "another part of that name"],
)
def test_what_cannot_be_scored_is_refused(
    tmp_path: Path, rollouts: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    trainer, module, datamodule, _ = setup_run(
        tmp_path,
        module_arguments={"parts": [RewardModel(reward_model(tmp_path)).plain()]},
        data_arguments=data,
        rollouts=RolloutCallback(**({"reward": digits, "sampling": SAMPLING} | rollouts)),
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, datamodule)
    assert trainer.global_step == 0


def test_scores_that_nothing_is_chosen_by_may_come_after_sampling_ahead(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    _, _, rollouts = fit_run(
        tmp_path,
        module_arguments={"parts": [RewardModel(folder).plain()]},
        data_arguments={"curriculum": ByColumn("answer")},
        rollouts=RolloutCallback(sampling=SAMPLING, parts=[Ahead(1)]),
        max_epochs=2,
    )
    assert [sample.reward for sample in rollouts.samples] == pytest.approx(
        ModelReward(folder)(rollouts.samples), abs=1e-5
    )


class Curriculum:
    """A reward that notes how far training is whenever it scores."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.now = (-1, -1)

    def set_progress(self, *, step: int, epoch: int) -> None:
        self.now = (step, epoch)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        self.seen.append(self.now)
        return digits(samples)


def test_a_reward_is_told_how_far_training_is(tmp_path: Path) -> None:
    reward = Curriculum()
    rollouts = RolloutCallback(WeightedSum(digits=reward), sampling=SAMPLING)
    fit_run(tmp_path, rollouts=rollouts, max_epochs=2)
    assert sorted({*reward.seen}) == [(0, 0), (2, 1)], "two updates in each iteration"


class Batching(LocalEngine):
    """Runs later requests beside earlier ones, as VLLMPool and VLLMServer do."""

    continuous_batching = True


def test_a_group_function_reads_texts_and_changes_training_only(tmp_path: Path) -> None:
    texts: list[str] = []

    async def half(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        made = await sampler.sample(prompt, size)
        texts.extend(one.text for one in made)
        return made[::2]

    held = {"validation_data": additions(7)}
    rollouts = RolloutCallback(digits, sampling=SAMPLING, engine=Batching(), group=half)
    fit_run(tmp_path, rollouts=rollouts, data_arguments=held, max_epochs=1)
    decoded = [tiny_tokenizer().decode(one.token_ids.tolist(), skip_special_tokens=True) for one in rollouts.samples]
    assert len(decoded) == 16
    assert {*decoded} <= {*texts}
    assert len(texts) == 32  # none of validation
    assert len(rollouts.validation_samples) == 7


def test_a_token_that_the_model_does_not_know_is_named_with_its_prompt(tmp_path: Path) -> None:
    class Foreign(LocalEngine):
        def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
            samples = super().generate(prompts, sampling, iteration=iteration)
            samples[5].token_ids = [*samples[5].token_ids.tolist()[:-1], 128]
            return samples

    rollouts = RolloutCallback(digits, sampling=SAMPLING, engine=Foreign())
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, max_epochs=1)
    with pytest.raises(RuntimeError, match=r"Foreign returned the token 128 for prompt \d+, .* the tokens 0 to 127"):
        trainer.fit(module, data)
