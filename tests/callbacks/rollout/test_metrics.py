"""Validation metrics against enumeration."""

import itertools
from pathlib import Path

import pytest
from rl_runs import digits, setup_run

from rlhfkit import Prompt, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.metrics import SampleNumbers, validation_metrics


def samples(index: int, rewards: list[float | None], **metadata: str) -> list[SampleNumbers]:
    prompt = Prompt(index, [5], metadata=dict(metadata))
    made = [Sample(prompt, place, [7], [0.0], [0], "stop", reward=reward) for place, reward in enumerate(rewards)]
    return [SampleNumbers.of(sample) for sample in made]


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    groups = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.5, 0.0, 0.0], [1.5, None, 0.0, 0.0]]
    metrics = validation_metrics([each for index, rewards in enumerate(groups) for each in samples(index, rewards)])
    for k in (1, 2, 4):
        hits = [
            sum(any((reward or 0.0) >= 1.0 for reward in subset) for subset in subsets) / len(subsets)
            for subsets in (list(itertools.combinations(rewards, k)) for rewards in groups)
        ]
        assert metrics[f"pass@{k}"] == (pytest.approx(sum(hits) / 3), 3)
    assert "pass@3" not in metrics
    assert metrics["reward"] == (pytest.approx(4.0 / 11), 11)


def test_a_reward_of_zero_is_a_success_where_that_is_enough() -> None:
    metrics = validation_metrics(samples(0, [0.0, -1.0, None, 0.0]), success_threshold=0.0)
    assert metrics["pass@1"] == (0.5, 1)


def test_sources_are_told_apart_when_there_are_several() -> None:
    easy, hard = samples(0, [1.0, 1.0], source="easy"), samples(1, [0.0, None], source="hard")
    assert "reward/easy" not in validation_metrics(easy)
    metrics = validation_metrics(easy + hard)
    assert metrics["reward/easy"] == (1.0, 2)
    assert metrics["reward/hard"] == (0.0, 1)
    assert metrics["pass@1/easy"] == metrics["pass@2/easy"] == (1.0, 1)
    assert metrics["pass@2/hard"] == (0.0, 1)
    assert metrics["length"] == (1.0, 4)


def test_a_run_logs_pass_at_k_for_sampled_validation(tmp_path: Path) -> None:
    rollouts = RolloutCallback(
        digits,
        sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        validation_sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        success_threshold=0.25,
    )
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n')
    held = {"validation_data": str(tmp_path / "held.jsonl"), "validation_split": "train"}
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, data_arguments=held)
    metrics = trainer.validate(module, data, verbose=False)[0]
    assert 0.0 <= metrics["val/pass@1"] <= metrics["val/pass@2"] <= metrics["val/pass@4"] <= 1.0
    right = [(sample.reward or 0.0) >= 0.25 for sample in rollouts.validation_samples]
    assert metrics["val/pass@1"] == pytest.approx(sum(right) / 8)
