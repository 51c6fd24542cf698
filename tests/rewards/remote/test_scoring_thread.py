"""ScoringThread: requests are scored one after another, once, and fail alone."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards.remote.server import ScoringThread


def request(*numbers: int) -> list[Sample]:
    return [Sample(Prompt(0, [1]), number, [], [], [], "stop") for number in numbers]


@contextmanager
def scoring(calls: list[list[int]], gate: threading.Event | None = None) -> Iterator[ScoringThread]:
    """A running thread whose scores are the samples' numbers; 13 is refused, and 14 leaves the program."""

    def score(samples: Sequence[Sample]) -> list[float | None]:
        calls.append([sample.sample_index for sample in samples])
        if gate is not None:
            assert gate.wait(10)
        if calls[-1] == [13]:
            raise ValueError("unlucky")
        if calls[-1] == [14]:
            sys.exit("enough")
        return [float(number) for number in calls[-1]]

    thread = ScoringThread(score)
    thread.start()
    try:
        yield thread
    finally:
        if gate is not None:
            gate.set()
        thread.close()


def test_each_request_gets_its_own_scores_or_its_own_error() -> None:
    calls: list[list[int]] = []
    with scoring(calls) as thread:
        asked = [(1, 2), (13,), (3, 4, 5), (14,), (), (6,)]
        waiting = [thread.submit(request(*numbers)) for numbers in asked]
        for numbers, scores in zip(asked, waiting, strict=True):
            if numbers == (13,):
                with pytest.raises(ValueError, match="unlucky"):
                    scores.result(5)
            elif numbers == (14,):
                with pytest.raises(RuntimeError, match="SystemExit: enough"):  # it would end a server's event loop
                    scores.result(5)
            else:
                assert scores.result(5) == [float(number) for number in numbers]
    assert calls == [list(numbers) for numbers in asked]


def test_what_is_cancelled_before_its_turn_is_not_scored() -> None:
    calls: list[list[int]] = []
    gate = threading.Event()
    with scoring(calls, gate) as thread:
        first = thread.submit(request(1))
        while not calls:
            time.sleep(0.001)
        given_up, last = thread.submit(request(2)), thread.submit(request(3))
        assert given_up.cancel()
        assert thread.scoring_seconds > 0
        gate.set()
        assert (first.result(5), last.result(5)) == ([1.0], [3.0])
    assert calls == [[1], [3]]
    assert thread.scoring_seconds == 0
