"""Errors of rewards name the reward, the rule and the solution. Covers ``rewards/base.py``."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards import WeightedSum, score_samples
from rlhfkit.rewards.base import RewardError


def samples(count: int = 3) -> list[Sample]:
    prompt = Prompt(7, [1, 2], "1+1=", answer="2", metadata={"level": 1, "source": "a"})
    return [Sample(prompt, i, [3, 4 + i], [0.0] * 2, [0] * 2, "stop", text=str(i)) for i in range(count)]


def endless(given: Sequence[Sample]) -> Iterator[float]:
    return itertools.repeat(1.0)


def short(given: Sequence[Sample]) -> Iterator[float]:
    yield 1.0


def ending_generator(given: Sequence[Sample]) -> Iterator[float]:
    yield 1.0
    raise SystemExit


async def async_generator(given: Sequence[Sample]) -> AsyncIterator[float]:
    yield 1.0


def ending(given: Sequence[Sample]) -> list[float]:
    raise SystemExit(3)


def missing(given: Sequence[Sample]) -> list[float]:
    return [float(sample.prompt.metadata["answer"]) for sample in given]


def changing(given: Sequence[Sample]) -> list[float]:
    given[1].token_ids = [*given[1].token_ids.tolist(), 9]
    return [0.0] * len(given)


def changing_prompts(given: Sequence[Sample]) -> list[float]:
    given[0].prompt.token_ids = [9, *given[0].prompt.token_ids.tolist()[1:]]
    return [0.0] * len(given)


async def changing_later(given: Sequence[Sample]) -> list[float]:
    await asyncio.sleep(0)
    return changing(given)


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (endless, ValueError, "'endless' returned 4 values for 3 samples; a reward returns one finite number"),
        (short, ValueError, "'short' returned 1 values for 3 samples"),
        (ending_generator, RewardError, r"'ending_generator' has called sys\.exit\(None\)"),
        (async_generator, ValueError, "'async_generator' returned async_generator for 3 samples; a reward returns one"),
        (lambda given: {0.0, 1.0, 2.0}, ValueError, "returned set for 3 samples; .* in order"),
        (lambda given: b"abc", ValueError, "returned bytes for 3 samples"),
        (ending, RewardError, r"'ending' has called sys\.exit\(3\), which would end the run: let it return None"),
        (
            missing,
            RewardError,
            "KeyError: 'answer'. The prompts' metadata has level, source; .*prompt.answer",
        ),
        (changing, ValueError, r"'changing' has changed the token ids of sample 1 \(prompt 7\).*work on a copy"),
        (changing_prompts, ValueError, "'changing_prompts' has changed the token ids of sample 0"),
        (changing_later, ValueError, "'changing_later' has changed the token ids of sample 1"),
        (lambda given: [1e39] * 3, ValueError, r"returned 1e\+39 for sample 0 .* float32, 3\.4e\+38 at most: scale it"),
        (lambda given: [0.0, 10**400, 0.0], ValueError, "for sample 1"),
    ],
)
def test_the_message_names_the_reward_the_rule_and_the_cure(
    reward: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        score_samples(reward, samples())
    with pytest.raises(error, match=r"reward 'part' (returned|has c|failed)"):
        score_samples(WeightedSum(part=reward), samples())


def test_any_other_error_stays_what_it_is_and_says_whose_it_is() -> None:
    def broken(given: Sequence[Sample]) -> list[float]:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        score_samples(broken, samples())
    assert caught.value.__notes__ == ["raised by reward 'broken', scoring 3 samples"]


def test_a_reward_that_reads_answers_which_are_not_there_is_told_so() -> None:
    given = samples()
    for one in given:
        one.prompt.answer = None
    with pytest.raises(TypeError) as caught:
        score_samples(lambda given: [len(one.prompt.answer) for one in given], given)
    assert "PromptDataModule(answer=...)" in caught.value.__notes__[-1]


def test_what_a_reward_does_to_its_list_moves_nobodys_reward() -> None:
    def sorting(given: list[Sample]) -> list[float]:
        values = [float(sample.sample_index) for sample in given]
        given.sort(key=lambda sample: -sample.sample_index)
        given.pop()
        return values

    found = samples()
    score_samples(sorting, found)  # type: ignore[arg-type]
    assert [sample.reward for sample in found] == [0.0, 1.0, 2.0]
