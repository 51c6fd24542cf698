"""A reward that runs long and cannot be stopped is named in a warning.

Covers ``warn_if_slow`` of rewards/base.py.
"""

import asyncio
import logging
import threading
import time

import pytest

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards import WeightedSum, score_samples
from rlhfkit.rewards import base as module
from rlhfkit.rewards.base import warn_if_slow


def samples() -> list[Sample]:
    return [Sample(Prompt(prompt, [1]), 0, [3], [-0.1], [0], "stop") for prompt in (5, 3)]


def slow_judge(batch: list[Sample]) -> list[float]:
    time.sleep(0.35)
    return [1.0] * len(batch)


def test_slow_reward_is_named_with_its_prompts_and_line_and_still_counts(caplog: pytest.LogCaptureFixture) -> None:
    batch = samples()
    score_samples(slow_judge, batch, warn_after=0.1)
    assert [sample.reward for sample in batch] == [1.0, 1.0]
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == 2  # after 0.1 s and after 0.2 s; the third would come after 0.4 s
    assert "reward 'slow_judge', called with 2 samples of prompts 3, 5, has been running for 0.1" in messages[0]
    assert "SandboxedReward" in messages[0]
    assert "time.sleep(0.35)" in messages[0]


def test_quick_and_bounded_rewards_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Bounded:
        has_timeout = True

        def __call__(self, batch: list[Sample]) -> list[float]:
            return slow_judge(batch)

    score_samples(WeightedSum(a=Bounded(), b=lambda batch: [0.0] * len(batch)), samples(), warn_after=0.1)
    assert not caplog.records


def test_errors_pass_through_and_the_time_is_checked() -> None:
    with pytest.raises(KeyError), warn_if_slow("this", "advice"):
        raise KeyError
    with (
        pytest.raises(ValueError, match="after must be a finite number above 0, got 0"),
        warn_if_slow("a", "b", after=0),
    ):
        pass


def test_async_reward_that_blocks_its_loop_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CANCEL_SECONDS", 0.1)

    given_up = threading.Event()

    async def blocking(batch: list[Sample]) -> list[float]:
        given_up.wait(60)
        await asyncio.sleep(0)
        return [1.0] * len(batch)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"'blocking' did not answer within 0\.1 s and could not be cancelled"):
        score_samples(blocking, samples(), timeout=0.1)
    assert time.monotonic() - start < 30
    given_up.set()
