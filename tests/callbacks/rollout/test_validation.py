"""Validation: metrics of groups, several ways of sampling and sources, the best checkpoint by any of them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from rl_runs import digits, setup_run

from rlhfkit import Prompt, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.parts.validation import SampleNumbers, Validation, validation_metrics
from rlhfkit.rewards import CosineLength, ExactMatch, LastTurnReward, WeightedSum, exact_match, math_match
from rlhfkit.rewards.base import answer_reader, extracts_answer
from rlhfkit.rewards.benchmarks import majority_at_k


def samples(index: int, rewards: list[float | None], answers: str = "") -> list[SampleNumbers]:
    prompt = Prompt(index, [5])
    made = [Sample(prompt, place, [7], [0.0], [0], "stop", reward=reward) for place, reward in enumerate(rewards)]
    votes = [None if answer == "-" else answer for answer in answers] if answers else [None] * len(made)
    return [SampleNumbers.of(sample, lambda _: vote) for sample, vote in zip(made, votes, strict=True)]  # noqa: B023


def test_metrics_of_subsets_take_what_is_missing_for_wrong_and_read_votes_where_there_are_some() -> None:
    """Of one, two, four and all samples of a prompt. The closed forms are in ``tests/rewards/test_benchmarks.py``."""
    groups = [([1.0, 0.0, 0.5, 0.0, 1.0], "abcba"), ([0.0, None, 0.25, 0.0, 0.0], "x-yxx")]
    numbers = [one for index, (rewards, answers) in enumerate(groups) for one in samples(index, rewards, answers)]
    metrics = validation_metrics(numbers, votes=True)
    assert {name.partition("@")[2] for name in metrics if "@" in name} == {"1", "2", "4", "5"}
    expected = {"avg@5": 0.275, "best@1": 0.275, "best@5": 0.625, "pass@1": 0.2, "pass@5": 0.5, "maj@5": 0.25}
    assert {name: metrics[name] for name in expected} == {
        name: (pytest.approx(value), 2) for name, value in expected.items()
    }
    assert metrics["reward"] == (pytest.approx(2.75 / 9), 9)  # of those that have one
    assert not [name for name in validation_metrics(numbers) if name.startswith("maj")]
    assert validation_metrics(numbers, success_threshold=0.0)["pass@1"] == (pytest.approx(0.9), 2)


def test_sources_are_told_apart_over_all_batches_when_there_are_several() -> None:
    runs = Validation({"greedy": SamplingSpec(), "sampled": SamplingSpec(group_size=2)}, success_threshold=1.0)
    seen: list[Sample] = []

    def batch(*each: tuple[str, list[float | None]], way: str = "sampled") -> dict[str, tuple[float, int]]:
        made = []
        for source, rewards in each:
            prompt = Prompt(len(seen) + len(made), [5], metadata={"source": source})
            made += [Sample(prompt, place, [7], [0.0], [0], "stop", reward=one) for place, one in enumerate(rewards)]
        seen.extend(made)
        return runs.batch_metrics({way: made}, rewarded=True, read=lambda sample: "ab"[sample.sample_index])

    runs.begin()
    assert batch(("easy", [1.0, 1.0]))["val/sampled/length"] == (1.0, 2)
    assert runs.source_metrics() == {}  # no other is known yet
    assert not [name for name in batch(("easy", [0.0, 0.0]), ("hard", [0.0, None])) if "/easy" in name]
    batch(("hard", [0.0, 1.0]))
    found = {name.removeprefix("val/sampled/"): value for name, value in runs.source_metrics().items()}
    assert (found["reward/easy"], found["reward/hard"]) == ((0.5, 4), (pytest.approx(1 / 3), 3))
    assert (found["pass@1/easy"], found["pass@2/easy"], found["pass@1/hard"]) == ((0.5, 2), (0.5, 2), (0.25, 2))
    assert (found["maj@1/hard"], found["best@2/hard"], found["avg@2/hard"]) == ((0.25, 2), (0.5, 2), (0.25, 2))
    assert found["length/easy"] == (1.0, 4)
    runs.begin()
    assert batch(("easy", [1.0]), way="greedy")["val/greedy/reward"] == (1.0, 1)
    assert runs.source_metrics() == {}


def test_rewards_that_read_answers_say_how_and_those_around_them_too() -> None:
    one = Sample(Prompt(0, [5]), 0, [7], [0.0], [0], "stop", text=r" So \boxed{1/2}. ", info={"last_text": " B. "})
    read = {name: answer_reader(reward) for name, reward in {
        "math_match": math_match, "exact_match": exact_match, "plain": digits, "none": None,
        "pattern": ExactMatch(pattern=r"So|(boxed)"), "sum": WeightedSum(digits=digits, right=exact_match),
        "last turn": LastTurnReward(ExactMatch(ignore_punctuation=True)), "partial": functools.partial(exact_match),
        "no part": WeightedSum(digits=digits), "cosine": CosineLength(exact_match, max_length=8),
    }.items()}  # fmt: skip
    assert {name: None if reader is None else reader(one) for name, reader in read.items()} == {
        "math_match": "1/2", "exact_match": r"So \boxed{1/2}.", "plain": None, "none": None, "pattern": "boxed",
        "sum": r"So \boxed{1/2}.", "last turn": "B", "partial": r"So \boxed{1/2}.", "no part": None,
        "cosine": r"So \boxed{1/2}.",
    }  # fmt: skip


@extracts_answer(lambda sample: sample.text[:1])
def first_letter(samples: Sequence[Sample]) -> list[float]:
    """Share of digits; the first letter is the answer."""
    return digits(samples)


MONITOR = "val/sampled/pass@2/hard"


class Scores(L.Callback):
    """The monitor after every validation."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(float(trainer.callback_metrics[MONITOR]))


def test_the_best_checkpoint_is_the_one_with_the_best_evaluation(tmp_path: Path) -> None:
    held = [{"prompt": f"{i}+1=", "answer": "", "source": "easy" if i % 3 else "hard"} for i in range(12)]
    greedy = SamplingSpec(group_size=1, max_new_tokens=8, temperature=0.0)
    sampled = SamplingSpec(group_size=4, max_new_tokens=8, seed=7)
    rollouts = RolloutCallback(
        WeightedSum(digits=first_letter),
        sampling=SamplingSpec(group_size=4, max_new_tokens=8),
        parts=[Validation({"greedy": greedy, "sampled": sampled}, success_threshold=0.5)],
    )
    saver = ModelCheckpoint(tmp_path / "best", monitor=MONITOR, mode="max", filename="{epoch}")
    scores = Scores()
    trainer, module, data, _ = setup_run(
        tmp_path,
        module_arguments={"lr": 1e-2},  # too much: validation goes up and down
        data_arguments={"validation_data": held},
        rollouts=rollouts,
        callbacks=[scores, saver],
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        max_epochs=6,
    )
    trainer.fit(module, data)
    values = scores.seen
    assert len(values) == 6
    assert len(set(values)) > 1
    assert float(saver.best_model_score) == max(values)  # type: ignore[arg-type]
    assert Path(saver.best_model_path).stem == f"epoch={values.index(max(values))}"
    metrics = trainer.validate(module, data, ckpt_path=saver.best_model_path, verbose=False)[0]
    assert metrics[MONITOR] == pytest.approx(max(values))
    assert len(rollouts.validation_samples) == 12 + 12 * 4
    assert metrics["val/greedy/reward"] == pytest.approx(sum(digits(rollouts.validation_samples[:12])) / 12)
    votes = [(one.text[:1], one.reward or 0.0) for one in rollouts.validation_samples[12:]]
    voted = [majority_at_k(*zip(*votes[first : first + 4], strict=True), 4) for first in range(0, 48, 4)]
    assert metrics["val/sampled/maj@4"] == pytest.approx(fmean(voted))
