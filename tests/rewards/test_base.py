"""Scoring samples: any callable is a reward, every value is checked, parts are logged by name, errors name the cure."""

import asyncio
import functools
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rewards.samples import sampled, scored
from rlhfkit.data import Sample
from rlhfkit.rewards import (
    ChatJudge,
    CodeExecution,
    CosineLength,
    ExactMatch,
    LastTurnReward,
    PairwiseReward,
    RemoteReward,
    Reward,
    SandboxedReward,
    SubprocessReward,
    WeightedSum,
    base,
    exact_match,
    math_match,
)
from rlhfkit.rewards.base import (
    Needs,
    RewardError,
    check_packages,
    needs,
    part_names,
    reward_name,
    reward_needs,
    score_samples,
)


def samples(answer: str | None = "5") -> list[Sample]:
    return [sampled(str(place), answer, prompt=7, place=place, level=1, source="a") for place in range(3)]


def by_index(batch: list[Sample]) -> list[float]:
    return [float(sample.sample_index) for sample in batch]


async def by_index_later(batch: list[Sample]) -> list[float]:
    await asyncio.sleep(0.01)
    return by_index(batch)


class LengthReward:
    def __call__(self, batch: list[Sample]) -> list[float]:
        return [float(len(sample.token_ids)) for sample in batch]


@pytest.mark.parametrize("reward", [by_index, by_index_later, functools.partial(by_index)])
def test_functions_sync_and_async_score_in_order_and_leave_no_older_parts(reward: object) -> None:
    batch = samples()
    assert scored(LengthReward(), batch) == [1.0] * 3
    assert scored(reward, batch) == [0.0, 1.0, 2.0]
    assert [sample.reward_parts for sample in batch] == [{reward_name(reward): float(i)} for i in range(3)]
    assert part_names(reward) == [reward_name(reward)]
    score_samples(lambda _: 1 / 0, [])  # no samples, no call


def test_async_reward_runs_while_the_callers_event_loop_is_running() -> None:
    """As in a notebook, where asyncio.run() would raise."""

    async def cell() -> list[float | None]:
        return scored(by_index_later, samples())

    assert asyncio.run(cell()) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("values", [np.array([0, 1, 2]), torch.tensor([0.0, 1.0, 2.0]), (0, True, 2), iter([0, 1, 2])])
def test_any_sequence_of_numbers_will_do(values: object) -> None:
    found = scored(lambda _: values, samples())
    assert found == [0.0, 1.0, 2.0]
    assert {type(value) for value in found} == {float}


@pytest.mark.parametrize("value", [math.nan, -math.inf, "1.0", [1.0], pytest.param(10**400, id="huge")])
def test_what_is_no_finite_number_names_reward_sample_and_prompt(value: object) -> None:
    def odd(_: list[Sample]) -> list[object]:
        return [1.0, value, 1.0]

    batch = samples()
    with pytest.raises(
        ValueError, match=r"(?s)reward 'odd' returned .* for sample 1 \(prompt 7: '1\+1=', completion: '1'\)"
    ):
        score_samples(odd, batch)
    assert [sample.reward for sample in batch] == [None] * 3


def endless(given: Sequence[Sample]) -> Iterator[float]:
    return itertools.repeat(1.0)


async def endless_later(given: Sequence[Sample]) -> Iterator[float]:
    return endless(given)


def ending(given: Sequence[Sample]) -> Iterator[float]:
    yield 1.0
    raise SystemExit(3)


def missing(given: Sequence[Sample]) -> list[float]:
    return [float(sample.prompt.metadata["answer"]) for sample in given]


def changing_prompts(given: Sequence[Sample]) -> list[float]:
    given[0].prompt.token_ids = [9, *given[0].prompt.token_ids.tolist()[1:]]
    return [0.0] * len(given)


async def changing_later(given: Sequence[Sample]) -> list[float]:
    await asyncio.sleep(0)
    given[1].token_ids = [*given[1].token_ids.tolist(), 9]
    return [0.0] * len(given)


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (endless, ValueError, "'endless' returned 4 values for 3 samples; a reward returns one finite number"),
        (endless_later, ValueError, "'endless_later' returned 4 values for 3 samples"),
        (lambda given: {0.0, 1.0, 2.0}, ValueError, "returned set for 3 samples; .* in order"),
        (lambda given: b"abc", ValueError, "returned bytes for 3 samples"),
        (lambda given: "abc", ValueError, "returned str for 3 samples"),
        (lambda given: {"a": 1.0, "b": 1.0, "c": 1.0}, ValueError, "returned dict for 3 samples"),
        (lambda given: None, ValueError, "returned NoneType for 3 samples"),
        (ending, RewardError, r"'ending' has called sys\.exit\(3\), which would end the run: let it return None"),
        (missing, RewardError, "KeyError: 'answer'. The prompts' metadata has level, source; .*prompt.answer"),
        (changing_prompts, ValueError, "'changing_prompts' has changed the token ids of sample 0"),
        (changing_later, ValueError, r"_later' has changed the token ids of sample 1 \(prompt 7\).*work on a copy"),
        (lambda given: [1e39] * 3, ValueError, r"returned 1e\+39 for sample 0 .* float32, 3\.4e\+38 at most: scale it"),
    ],
)
def test_the_message_names_the_reward_the_rule_and_the_cure(
    reward: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        score_samples(reward, samples())
    with pytest.raises(error, match=r"reward 'part' (returned|has c|failed)"):
        score_samples(WeightedSum(part=reward), samples())


def test_any_other_error_stays_what_it_is_and_says_whose_it_is_and_that_there_are_no_answers() -> None:
    def broken(given: Sequence[Sample]) -> list[float]:
        return [len(one.prompt.answer) for one in given]

    with pytest.raises(TypeError) as caught:
        score_samples(broken, samples(answer=None))
    whose, why = caught.value.__notes__
    assert whose == "raised by reward 'broken', scoring 3 samples"
    assert "PromptDataModule(answer=...)" in why


def test_what_a_reward_does_to_its_list_moves_nobodys_reward() -> None:
    def sorting(given: list[Sample]) -> list[float]:
        values = [float(sample.sample_index) for sample in given]
        given.sort(key=lambda sample: -sample.sample_index)
        given.pop()
        return values

    assert scored(sorting, samples()) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("blocks", [False, True])
def test_async_reward_that_does_not_answer_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch, blocks: bool) -> None:
    monkeypatch.setattr(base, "_CANCEL_SECONDS", 0.1 if blocks else 60.0)
    given_up = threading.Event()

    async def judge(_: list[Sample]) -> list[float]:
        if blocks:  # its event loop
            given_up.wait(60)
        await asyncio.sleep(60)
        return []

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"reward 'judge' did not answer within 0\.05 s") as caught:
        score_samples(judge, samples(), timeout=0.05)
    assert ("could not be cancelled" in str(caught.value)) == blocks
    assert time.monotonic() - start < 30
    given_up.set()


def test_weighted_sums_nest_and_log_each_part_unweighted() -> None:
    batch = samples()
    inner = WeightedSum({"index": (by_index, 2.0)}, length=(LengthReward(), -0.5))
    assert scored(WeightedSum(both=(inner, 10.0), later=by_index_later), batch) == [-5.0, 16.0, 37.0]
    assert batch[2].reward_parts == {"index": 2.0, "length": 1.0, "both": 3.5, "later": 2.0}


def test_async_parts_wait_at_the_same_time() -> None:
    arrived = []

    def part(name: str) -> object:
        async def wait(batch: list[Sample]) -> list[float]:
            arrived.append(name)
            while len(arrived) < 3:  # ends only if all three are running
                await asyncio.sleep(0.001)
            return by_index(batch)

        return wait

    assert scored(WeightedSum(a=part("a"), b=part("b"), c=part("c"), timeout=60), samples()) == [0.0, 3.0, 6.0]


def test_missing_part_makes_the_total_missing_or_is_left_out() -> None:
    parts = {"sure": by_index, "unsure": lambda _: [None, 1.0, None]}
    batch = samples()
    assert scored(WeightedSum(parts), batch) == [None, 2.0, None]
    assert math.isnan(batch[0].reward_parts["unsure"])
    assert scored(WeightedSum(parts, missing="skip"), batch) == [0.0, 2.0, 2.0]
    assert scored(WeightedSum(only=lambda _: [None] * 3, missing="skip"), batch) == [None] * 3


def test_rewards_are_readable_from_a_configuration_file() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("reward", type=Reward)
    short = {"class_path": "rlhfkit.rewards.LengthPenalty", "init_args": {"max_length": 2, "soft_zone": 2}}
    parts = {"correct": "rlhfkit.rewards.exact_match", "short": [short, 0.5]}
    written = {"class_path": "rlhfkit.rewards.WeightedSum", "init_args": {"parts": parts}}
    reward = parser.instantiate(parser.parse_object({"reward": written})).reward
    batch = samples()[:1]
    assert scored(reward, batch) == [-0.25]
    assert batch[0].reward_parts == {"correct": 0.0, "short": -0.5}


MATH = Needs(packages={"math_verify": "rlhfkit[math]"}, answer=True)
CLIENT = Needs(packages={"httpx": "rlhfkit[server]", "tenacity": "rlhfkit[server]"})


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (by_index, {}),
        (math_match, {"math_match": MATH}),
        (functools.partial(math_match), {"math_match": MATH}),
        (exact_match, {"exact_match": Needs(answer=True)}),
        (CodeExecution(tests="cases"), {"code_execution": Needs(columns=("cases",))}),
        (RemoteReward("http://127.0.0.1:1"), {"remote_reward": CLIENT}),
        (
            PairwiseReward(ChatJudge("http://127.0.0.1:1/v1", model="judge"), against="answer"),
            {"chat_judge_win_rate": Needs(answer=True), "chat_judge": CLIENT},
        ),
        (
            WeightedSum(last=LastTurnReward(math_match), short=CosineLength(ExactMatch(), max_length=8)),
            {"math_match": MATH, "exact_match": Needs(answer=True)},
        ),
        (SandboxedReward(math_match), {"math_match": MATH}),
        (SubprocessReward(math_match), {"math_match": MATH}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_needs_are_those_of_the_reward_and_of_all_that_it_calls(reward: object, expected: dict[str, Needs]) -> None:
    assert dict(reward_needs(reward)) == expected


def test_missing_packages_are_named_with_the_line_that_installs_all_of_them() -> None:
    @needs(packages={"no_such_package": "no-such-package>=2", "torch": "torch"})
    def unit(batch: list[Sample]) -> list[float]:
        return by_index(batch)

    @needs(packages={"nor_this": "rlhfkit[other]"})
    def other(batch: list[Sample]) -> list[float]:
        return by_index(batch)

    check_packages(math_match)  # which is installed for the tests
    message = (
        "unit needs no_such_package and other needs nor_this, not installed here: "
        "pip install 'no-such-package>=2' 'rlhfkit[other]'"
    )
    with pytest.raises(ImportError, match=re.escape(message)):
        check_packages(WeightedSum(unit=unit, math=math_match, other=other))


# ---------------------------------------------------------------------- slow calls


def of_two_prompts() -> list[Sample]:
    return [sampled(prompt=5), sampled(prompt=3)]


def test_slow_reward_is_named_with_its_prompts_and_line_and_still_counts(caplog: pytest.LogCaptureFixture) -> None:
    def slow_judge(batch: list[Sample]) -> Iterator[float]:
        end = time.monotonic() + 120
        while len(caplog.records) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        yield from [1.0] * len(batch)

    batch = of_two_prompts()
    score_samples(slow_judge, batch, warn_after=0.1)
    assert [sample.reward for sample in batch] == [1.0, 1.0]
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    seconds = [float(re.search(r"running for ([\d.]+) s", message)[1]) for message in messages]  # type: ignore[index]
    assert all(found >= least for found, least in zip(seconds, (0.1, 0.2, 0.4), strict=True))
    assert "reward 'slow_judge', called with 2 samples of prompts 3, 5, has been running for" in messages[0]
    assert "SandboxedReward" in messages[0]
    assert "in slow_judge" in messages[0]


def test_quick_and_bounded_rewards_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Bounded:
        has_timeout = True

        def __call__(self, batch: list[Sample]) -> list[float]:
            time.sleep(0.1)
            return [1.0] * len(batch)

    score_samples(WeightedSum(a=Bounded()), of_two_prompts(), warn_after=0.01)
    score_samples(lambda batch: [0.0] * len(batch), of_two_prompts(), warn_after=60)
    assert not caplog.records
