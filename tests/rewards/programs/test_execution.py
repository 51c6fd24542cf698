"""Scoring programs: what passes, what fails, and that a program's effects stay in its sandbox.

Covers ``evaluation.py``, ``judge.py``, ``parsing.py``, ``worker.py`` and ``driver.py`` too.
"""

import json
import time
from collections.abc import Iterator

import pytest

from rewards.samples import sampled, scored
from rlhfkit.data import Sample
from rlhfkit.rewards import CodeExecution
from rlhfkit.rewards.base import RewardError
from rlhfkit.rewards.programs.evaluation import ProgramEvaluation, SandboxError
from rlhfkit.rewards.programs.parsing import ProgramTests, last_code_block, parse_tests, same_output
from rlhfkit.rewards.sandbox import CallResult

ADD = "def add(a, b):\n    return a + b\n"
ADDITIONS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(1, 1) == 3"]
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7", "12"]}
SUM = "print(sum(map(int, input().split())))"


def sample(program: str | None, tests: object, **columns: object) -> Sample:
    text = "I do not know." if program is None else f"So:\n```python\n{program}\n```\nThat is it."
    return sampled(text, prompt=4, tests=tests, **columns)


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeExecution]:
    made = CodeExecution(setup="before", timeout=60.0, workers=2)
    yield made
    made.close()


RIGHT = {"function": "add", "arguments": [1, 2], "expected": 3}
LISTED = {"function": "add", "arguments": [[1], [2]], "expected": [1, 2]}
EXAMINED = [
    (ADD, ADDITIONS, 2 / 3),
    (SUM, SUMS, 2 / 3),
    ("def add(a, b): return a - b", ADDITIONS[:2], 0.0),
    ("def add(a b)", ADDITIONS, 0.0),
    ("raise ValueError", SUMS, 0.0),
    (f"{SUM}\nraise SystemExit(1)", SUMS, 0.0),
    (f"{SUM}\nfor _ in range(3000): print('x' * 1000)", SUMS, 0.0),  # more than may be printed
    (None, SUMS, 0.0),
    (ADD + "if __name__ == '__main__': input()", json.dumps(ADDITIONS[:2]), 1.0),
    (f"import sys, numpy, __main__\nif __name__ == '__main__' and len(sys.argv) == 1:\n    {SUM}\nexit()", SUMS, 2 / 3),
    # Calls that are given as data.
    (ADD, [RIGHT, LISTED, {**LISTED, "arguments": [(1,), (2,)]}], 2 / 3),
    (ADD, json.dumps([RIGHT, LISTED]), 1.0),
    # Answers of other kinds.
    ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"], 1.0),
    ("def f(n): return 10 ** n", ["assert f(5000) == 10 ** 5000"], 1.0),
    ("def f(n): return [f(n - 1)] if n > 1 else []", [f"assert f(150) == {'[' * 150}{']' * 150}"], 1.0),
    ("from __future__ import annotations\ndef f(n: Any): return tuple(range(n))", ["assert f(2) == (0, 1)"], 1.0),
]
"""Programs, their tests, and how many of them pass."""


def test_the_fraction_of_tests_that_pass(reward: CodeExecution, caplog: pytest.LogCaptureFixture) -> None:
    batch = [sample(program, tests, before="import math") for program, tests, _ in EXAMINED]
    assert scored(reward, batch) == [passed for _, _, passed in EXAMINED]
    metrics = reward.metrics()
    assert metrics["code_execution/failed_fraction"] == 0.0
    assert 0.0 < metrics["code_execution/seconds_p50"] < 60
    assert caplog.text == ""


def test_all_or_nothing_of_the_first_tests_with_setup() -> None:
    strict = CodeExecution(setup="before", all_or_nothing=True, max_tests=2, workers=2)
    right = sample("def add(a, b): return reduce(operator.add, (a, b))", ADDITIONS)
    right.prompt.metadata["before"] = "import operator\nfrom functools import reduce"
    half = sample(SUM, {"inputs": ["1 2", "3 4"], "outputs": ["3", "8"]})
    assert strict([right, half]) == [1.0, 0.0]


def test_assertions_that_are_more_than_calls_run_with_the_program_and_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = CodeExecution(workers=1)
    tests = [
        "assert add(1, 2) == 3",
        "for n in (1, 2):\n    assert add(n, n) == 2 * n",
        "assert add(*[1, 2]) == 4",
        "import sys; sys.exit(0)",
    ]
    assert one([sample(ADD, tests), sample(ADD, tests)]) == [2 / 4, 2 / 4]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "3 of the 4 tests of prompt 4 are more than calls with plain values, so they run inside" in warning
    assert "a program can make them pass without being right" in warning


def test_an_answer_that_cannot_be_compared_is_named_once(
    reward: CodeExecution, caplog: pytest.LogCaptureFixture
) -> None:
    program = "class Point: pass\nclass Line: pass\ndef f(n): return [Point(), Line()][n]"
    tests = ["assert f(0) == 1", "assert f(0)", "assert f(1) == (0, 0)"]
    assert reward([sample(program, tests)] * 2) == [1 / 3] * 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "a program of prompt 4 answered with 'Line', 'Point', which is no plain data and equals nothing" in warning


@pytest.mark.long
def test_programs_that_hang_fail_alone() -> None:
    quick = CodeExecution(timeout=5.0, workers=2)
    programs = [
        "while True: pass",
        f"{ADD}\ndef add(a, b):\n    while a < 0: pass\n    return 3",  # two of three tests pass before it hangs
        ADD,
    ]
    started = time.monotonic()
    tests = [ADDITIONS[0], ADDITIONS[2], ADDITIONS[1]]
    assert quick([sample(program, tests) for program in programs]) == [0.0, 2 / 3, 2 / 3]
    assert quick.metrics()["code_execution/timeout_fraction"] == 2 / 3
    assert quick([sample("a = input()\nif a[0] == '3': input() or exit(1)\n" + SUM, SUMS)]) == [0.0]
    assert quick([sample("import time\na = input()\nif a == '3 4': time.sleep(600)\nprint(3)", SUMS)]) == [1 / 3]
    assert time.monotonic() - started < 120  # of programs that never end


LEAVES_A_DAEMON = """
import fcntl, os
number, lock = input(), open("lock", "w")
if number == "1":
    ready, go = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
            memory = b"x" * (300 << 20)  # which takes a moment to free, before the lock is
            os.write(go, b"x")
            for pipe in (0, 1, 2): os.close(pipe)
            import time
            time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    print("started")
else:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("gone")
    except OSError:
        print("still there")
"""


def test_what_one_run_leaves_behind_ends_before_the_next_in_the_first_call_too() -> None:
    """Every process of a program is killed if none outside of its sandbox can be signalled."""
    new = CodeExecution(workers=1)
    tests = {"inputs": ["1\n", "2\n"], "outputs": ["started", "gone"]}
    assert [new([sample(LEAVES_A_DAEMON, tests)]) for _ in range(2)] == [[1.0], [1.0]]
    new.close()


def test_a_program_that_ends_its_sandbox_follows_the_policy(caplog: pytest.LogCaptureFixture) -> None:
    eats = "import os, time\nfor _ in range(4): os.fork()\neaten = b'x' * (100 << 20)\ntime.sleep(600)"
    with pytest.raises(RewardError, match=r"prompt 4, sample 0 could not be run to its end: died: .* GiB of memory"):
        CodeExecution(timeout=60.0, workers=1, memory_gib=0.5, on_failure="stop")([sample(eats, SUMS)])
    assert CodeExecution(timeout=60.0, workers=1, memory_gib=0.5)([sample(eats, SUMS)]) == [0.0]
    assert "the program of prompt 4, sample 0 could not be run" in caplog.text


@pytest.mark.parametrize("value", [None, {"text": 1, "timeout": False}, {"text": "", "timeout": 0}])
def test_what_no_worker_of_ours_answers_is_an_error(value: object) -> None:
    def answer(job: object, timeout: float) -> CallResult:
        return CallResult("ok", value)

    examination = ProgramEvaluation(answer, answer, [ADD], timeout=1.0)
    with pytest.raises(SandboxError, match="its sandbox answered"):
        examination.count_passed(ProgramTests(assertions=("assert add(1, 2) == 3",)), same_output)


def test_rows_without_tests_are_named(reward: CodeExecution) -> None:
    with pytest.raises(ValueError, match="from column 'tests', which prompt 4 does not have; it has reference, source"):
        reward([sampled(prompt=4, source=1, reference=2)])
    with pytest.raises(ValueError, match="column 'tests' of prompt 4: tests must be a list of assert statements"):
        reward([sample(SUM, 5)])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["assert a", "assert b"], ProgramTests(assertions=("assert a", "assert b"))),
        ("def check(f): ...\ncheck(add)", ProgramTests(assertions=("def check(f): ...\ncheck(add)",))),
        ([{"input": "1", "output": "2"}], ProgramTests(inputs=("1",), outputs=("2",))),
        ({"input": ["1"], "output": ["2"]}, ProgramTests(inputs=("1",), outputs=("2",))),
        (json.dumps(SUMS), ProgramTests(inputs=tuple(SUMS["inputs"]), outputs=tuple(SUMS["outputs"]))),
    ],
)
def test_tests_are_read_in_the_forms_of_known_data_sets(given: object, expected: ProgramTests) -> None:
    assert parse_tests(given) == expected


@pytest.mark.parametrize(
    "given",
    ["", [], "[1", "[1]", {"inputs": ["1"], "outputs": []}, {"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}, None],
)
def test_other_forms_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="a list of assert statements, or a list of"):
        parse_tests(given)


def test_the_last_closed_block_of_python_is_the_program() -> None:
    text = "```python\na\n```\n```py\nb\n```\n```bash\nls\n```\n```\nc\nd\n```\n```python\ncut off"
    assert last_code_block(text) == "c\nd\n"
    assert last_code_block("a = 1") is None
    assert last_code_block("```python\ncut off") is None


def test_many_open_fences_cost_no_time() -> None:
    started = time.monotonic()
    assert last_code_block("```python\n" * 200_000) is None
    assert time.monotonic() - started < 30  # with a search from each of them it was minutes


def test_outputs_agree_but_for_white_space_at_ends() -> None:
    assert same_output("1  \n2\n\n", "1\n2")
    assert not same_output("1 2", "1\n2")
    assert not same_output("", "1")
