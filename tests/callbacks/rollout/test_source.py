"""A reward model that is a child of the module scores samples for selection, the curriculum, metrics and the loss."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from modules.on_policy.preparation.test_rewards import reward_model
from rl_runs import additions, digits, fit_run, setup_run
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


def fitted(tmp_path: Path, reward: Any, **arguments: Any) -> tuple[Any, RolloutCallback]:
    """A run with dynamic sampling by the sign of the reward model's score."""
    rollouts = RolloutCallback(reward, sampling=SAMPLING, parts=[DynamicSampling(by=above_zero)])
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, max_epochs=2, **arguments)
    return trainer, rollouts


def identity(samples: Sequence[Sample]) -> list[tuple[int, int, list[int]]]:
    return [(sample.prompt.index, sample.sample_index, sample.token_ids.tolist()) for sample in samples]


def test_dynamic_sampling_selects_by_the_scores_of_a_reward_model_among_the_children(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    trainer, child = fitted(tmp_path, None, module_arguments={"parts": [RewardModel(folder).plain()]})
    _, beside = fitted(tmp_path, WeightedSum(model=ModelReward(folder)))
    assert 0.0 < trainer.callback_metrics["rollout/accepted_fraction"] < 1.0
    assert trainer.callback_metrics["rollout/zero_advantage_fraction"] == 0.0
    for first in range(0, 32, 4):
        assert len({above_zero(sample) for sample in child.samples[first : first + 4]}) == 2
    assert identity(child.samples) == identity(beside.samples)
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
    tries: list[Sample] = []

    async def best(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        """Of each two tries the one with more digits."""
        pairs = [await sampler.sample(prompt, size, attempt=attempt) for attempt in (0, 1)]
        tries.extend(pairs[0])
        return [max(pair, key=lambda one: sum(map(str.isdigit, one.text))) for pair in zip(*pairs, strict=True)]

    held = {"validation_data": additions(7)}
    rollouts = RolloutCallback(digits, sampling=SAMPLING, engine=Batching(), group=best)
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, data_arguments=held, max_epochs=1)
    assert {one.prompt.index for one in tries} == {one.prompt.index for one in rollouts.samples}
    assert len(tries) == 32  # none of validation
    for one in tries:
        assert one.text == tiny_tokenizer().decode(one.token_ids.tolist(), skip_special_tokens=True)
    assert trainer.callback_metrics["rollout/reward"] > fmean(digits(tries))
    assert float(trainer.callback_metrics["val/reward"]) == pytest.approx(fmean(digits(rollouts.validation_samples)))
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
