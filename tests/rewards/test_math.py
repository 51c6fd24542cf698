"""Grading mathematics: equal values match, nothing hangs, no process is left behind. Covers ``math_worker.py`` too."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.samples import sampled
from rlhfkit.rewards import MathMatch, math_match
from rlhfkit.rewards import math as module
from rlhfkit.rewards.sandbox import SandboxPool, WorkerSpec


@pytest.fixture(scope="module")
def reward() -> Iterator[MathMatch]:
    made = MathMatch(timeout=60, workers=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("42", "The answer is 42", 1.0),
        (42, r"\boxed{42}", 1.0),
        ("42", "43", 0.0),
        ("42", "", 0.0),
        ("1234", "It costs $1,234.", 1.0),
        (r"\frac{1}{2}", "so $0.5$", 1.0),
        ("0.5", r"\boxed{\frac12}", 1.0),
        ("x+1", r"$1 + x$", 1.0),
        (r"$3\sqrt{2}$", r"\boxed{\sqrt{18}}", 1.0),
        ("(1, 2)", r"\boxed{(2, 1)}", 0.0),
    ],
)
def test_equal_values_match_however_written(reward: MathMatch, answer: object, text: str, score: float) -> None:
    assert reward([sampled(text, answer)]) == [score]


def test_expression_that_never_ends_counts_as_wrong_and_the_next_is_judged(reward: MathMatch) -> None:
    reward.sandbox.timeout = 2.0
    try:
        assert reward([sampled(r"$9^{9^{9^{9}}}$", "42")]) == [0.0]
    finally:
        reward.sandbox.timeout = 60.0
    assert reward([sampled("42", "42")]) == [1.0]


def test_a_judge_that_has_been_taken_over_gives_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    made = MathMatch(workers=1)
    program = Path(__file__).parent / "sandbox" / "misbehaving.py"
    made.sandbox = SandboxPool(
        WorkerSpec(name="t", program=program, factory="of_no_judge", packages=False), workers=1, timeout=20
    )
    assert made([sampled("42", "42")]) == [0.0]
    assert "judging it failed: answered 7.0" in caplog.text
    made.close()


def test_reference_that_cannot_be_understood_is_not_scored(reward: MathMatch, caplog: pytest.LogCaptureFixture) -> None:
    assert reward([sampled("3", ""), sampled("3", "3")]) == [None, 1.0]
    assert "cannot understand these reference answers" in caplog.text


def test_shared_function_and_missing_answer() -> None:
    with pytest.raises(ValueError, match="math_match compares with the prompt's answer, but prompt 3 has none"):
        math_match([sampled("42", None, prompt=3)])
    assert module._shared().sandbox.processes[0].pid is None  # nothing was started for it


def test_without_math_verify_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'rlhfkit\[math\]'"):
        MathMatch()
