"""Batcher: requests that arrive together are scored in one batch, once, and fail alone."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards.remote.server import Batcher

PROMPT = Prompt(0, [1])


def request(*numbers: int) -> list[Sample]:
    return [Sample(PROMPT, number, [], [], [], "stop") for number in numbers]


@contextmanager
def scoring(batches: list[list[int]], gate: threading.Event | None = None, **arguments: float) -> Iterator[Batcher]:
    """A running batcher whose scores are the samples' numbers; number 13 is refused."""

    def score(samples: Sequence[Sample]) -> list[float | None]:
        batches.append([sample.sample_index for sample in samples])
        if gate is not None:
            assert gate.wait(10)
        if any(sample.sample_index == 13 for sample in samples):
            raise ValueError("unlucky")
        return [float(sample.sample_index) for sample in samples]

    batcher = Batcher(score, **arguments)
    batcher.start()
    try:
        yield batcher
    finally:
        if gate is not None:
            gate.set()
        batcher.close()


def test_requests_are_scored_together_up_to_the_limit_or_the_wait() -> None:
    batches: list[list[int]] = []
    with scoring(batches, max_batch=4, max_wait=0.2) as batcher:
        waiting = [batcher.submit(request(1, 2)), batcher.submit(request(3, 4, 5)), batcher.submit(request(6))]
        assert [future.result(5) for future in waiting] == [[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]]
        assert batches == [[1, 2, 3, 4, 5], [6]]
        assert batcher.submit([]).result(5) == []
    batches.clear()
    with scoring(batches, max_wait=0.0) as batcher:
        assert batcher.submit(request(1)).result(5) == [1.0]
        assert batcher.submit(request(2)).result(5) == [2.0]
    assert batches == [[1], [2]]


def test_what_arrives_during_a_batch_is_the_next_one() -> None:
    batches: list[list[int]] = []
    gate = threading.Event()
    with scoring(batches, gate, max_wait=0.0) as batcher:
        first = batcher.submit(request(1))
        while not batches:
            time.sleep(0.001)
        later = [batcher.submit(request(number)) for number in (2, 3, 4)]
        given_up = batcher.submit(request(5))
        assert given_up.cancel()
        assert batcher.scoring_seconds > 0
        gate.set()
        wait([first, *later], timeout=5)
    assert batches == [[1], [2, 3, 4]]
    assert batcher.scoring_seconds == 0


def test_only_the_request_at_fault_fails() -> None:
    batches: list[list[int]] = []
    with scoring(batches, max_wait=0.2, max_batch=3) as batcher:
        good, bad, other = batcher.submit(request(1)), batcher.submit(request(13)), batcher.submit(request(2))
        assert (good.result(5), other.result(5)) == ([1.0], [2.0])
        with pytest.raises(ValueError, match="unlucky"):
            bad.result(5)
    assert batches == [[1, 13, 2], [1], [13], [2]]


def test_a_batch_whose_time_is_up_is_not_scored_again() -> None:
    calls = []

    def too_long(samples: Sequence[Sample]) -> list[float | None]:
        calls.append(len(samples))
        raise TimeoutError("too long")

    batcher = Batcher(too_long, max_batch=3, max_wait=5.0)
    batcher.start()
    for future in [batcher.submit(request(number)) for number in range(3)]:
        with pytest.raises(TimeoutError, match="too long"):
            future.result(5)
    assert calls == [3]
    batcher.close()


def test_a_reward_that_leaves_the_program_fails_its_request_only() -> None:
    def leave(samples: Sequence[Sample]) -> list[float | None]:
        if samples[0].sample_index == 13:
            sys.exit("enough")
        return [0.0] * len(samples)

    batcher = Batcher(leave, max_wait=0.0)
    batcher.start()
    with pytest.raises(RuntimeError, match="SystemExit: enough"):  # as SystemExit it would end a server's event loop
        batcher.submit(request(13)).result(5)
    assert batcher.submit(request(1)).result(5) == [0.0]
    batcher.close()


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), max_size=12), max_batch=st.integers(1, 8))
def test_nobody_gets_the_scores_of_another(sizes: list[int], max_batch: int) -> None:
    batches: list[list[int]] = []
    with scoring(batches, max_batch=max_batch, max_wait=0.001) as batcher:
        numbers = iter(range(100, 1000))
        asked = [[next(numbers) for _ in range(size)] for size in sizes]
        answers = [batcher.submit(request(*one)) for one in asked]
        assert [answer.result(5) for answer in answers] == [[float(number) for number in one] for one in asked]
    assert sorted(number for batch in batches for number in batch) == sorted(number for one in asked for number in one)
