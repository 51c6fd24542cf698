"""Metrics of benchmarks: closed forms against all subsets, one by one."""

import itertools
import random
from collections import Counter
from statistics import fmean

import pytest

from rlhfkit.rewards.benchmarks import (
    GradedSample,
    benchmark_metrics,
    best_at_k,
    majority_at_k,
    metrics_by_source,
    metrics_table,
    pass_at_k,
    voted_answer,
)

REWARDS = [0.0, 1.0, 0.25, 1.0, -0.5, 0.0]


@pytest.mark.parametrize("k", range(1, 7))
def test_best_and_pass_are_means_over_all_subsets(k: int) -> None:
    subsets = list(itertools.combinations(REWARDS, k))
    assert best_at_k(REWARDS, k) == pytest.approx(fmean(max(one) for one in subsets))
    assert pass_at_k(REWARDS, k) == pytest.approx(fmean(any(r >= 1 for r in one) for one in subsets))


@pytest.mark.parametrize("k", range(1, 7))
def test_the_majority_is_a_mean_over_all_subsets_in_which_ties_count_equally(k: int) -> None:
    votes = ["a", "b", "a", "b", None, "c"]
    rewards = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]  # b is right

    def outcome(subset: tuple[int, ...]) -> float:
        counts = Counter(votes[i] for i in subset if votes[i])
        winners = [vote for vote in counts if counts[vote] == max(counts.values())]
        return ("b" in winners) / max(len(winners), 1)

    expected = fmean(outcome(subset) for subset in itertools.combinations(range(6), k))
    assert majority_at_k(votes, rewards, k) == pytest.approx(expected)


def test_many_subsets_are_drawn_and_the_same_each_time() -> None:
    draw = random.Random(1)
    votes = [draw.choice("aab") for _ in range(40)]
    rewards = [float(vote == "a") for vote in votes]
    found = majority_at_k(votes, rewards, 9)
    assert found == majority_at_k(votes, rewards, 9)
    assert 0.8 < found < 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("2 + 2 #### 1,234", "1234"),
        ("from 3 to 1,024.5 it is -7", "-7"),
        ("Paris", "Paris"),
        ("", None),
        ("no\nanswer", None),
    ],
)
def test_the_answer_that_votes_is_found(text: str, answer: str | None) -> None:
    assert voted_answer(text) == answer


def test_metrics_are_means_over_questions_by_source() -> None:
    right = [GradedSample("q", 1.0, "5", "easy"), GradedSample("q", 1.0, "5", "easy")]
    hard = [GradedSample("r", 0.0, "3", "hard"), GradedSample("r", None, "4", "hard")]
    more = [*hard, GradedSample("r", 1.0, "4", "hard")]
    metrics = benchmark_metrics([*right, *hard])
    assert metrics == {
        "questions": 2.0, "samples": 4.0, "ungraded": 1.0, "avg@2": 0.5, "stderr": pytest.approx(0.5),
        "pass@1": 0.5, "pass@2": 0.5, "best@1": 0.5, "best@2": 0.5, "maj@1": 0.5, "maj@2": 0.5,
    }  # fmt: skip
    both = metrics_by_source([*right, *more])
    assert list(both) == ["all", "easy", "hard"]
    assert both["hard"]["avg@3"] == pytest.approx(1 / 3)
    assert both["hard"]["maj@3"] == 0.5, "the answer 4 has two votes, of which one was graded right"
    assert list(metrics_by_source(right)) == ["all"]
    assert "maj@1" not in benchmark_metrics([GradedSample(1, 1.0)])
    assert metrics_table(metrics_by_source(right)).splitlines()[2] == (
        "| all | 1 | 2 | 0 | 1.000 ± 0.000 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 | 1.000 |"
    )
    with pytest.raises(ValueError, match="no samples"):
        benchmark_metrics([])


def test_parts_that_number_their_questions_alike_have_questions_of_their_own() -> None:
    samples = [GradedSample(0, reward, source=source) for source, reward in (("a", 1.0), ("a", 1.0), ("b", 0.0))]
    found = metrics_by_source(samples)
    assert [found[name]["questions"] for name in ("all", "a", "b")] == [2, 1, 1]
    assert found["all"]["avg@1"] == 0.5
