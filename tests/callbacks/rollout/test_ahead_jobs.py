"""Jobs beside the training loop: none lost, none run twice, in order, and never while they are paused."""

import threading
import time

import pytest
from waiting import LIMIT

from rlhfkit.callbacks.rollout.parts.ahead import Jobs


def test_who_holds_may_have_jobs_run_first() -> None:
    """Two processes run their jobs together; one is held before it begins a job that the other has begun already."""
    jobs = Jobs[int]()
    ran: list[int] = []
    release = threading.Event()

    def job(number: int) -> int:
        if number == 3:
            release.wait(LIMIT)
        ran.append(number)
        return number

    for number in range(8):
        jobs.submit(number, lambda number=number: job(number))
    assert jobs.result(2, timeout=LIMIT) == 2  # the third is running or about to

    def others_are_at_5(mine: int) -> int:
        assert mine in (2, 3)
        release.set()
        return 5

    with jobs.paused(timeout=LIMIT, agree=others_are_at_5):
        assert ran == list(range(6))
        time.sleep(0.005)
        assert ran == list(range(6))
    assert jobs.result(7, timeout=LIMIT) == 7
    jobs.clear(LIMIT)


def test_every_wait_has_a_limit_and_says_what_it_waited_for() -> None:
    jobs = Jobs[int]()
    release = threading.Event()
    begun = threading.Event()
    jobs.submit(3, lambda: begun.set() or int(release.wait(LIMIT)))  # type: ignore[func-returns-value]
    jobs.submit(4, lambda: 1)
    assert begun.wait(LIMIT)
    with pytest.raises(TimeoutError, match=r"iteration 3 took longer than 0\.05 s: still running"):
        jobs.result(3, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"iteration 4 .* waiting behind others"):
        jobs.result(4, timeout=0.05)
    with pytest.raises(TimeoutError, match="iteration 3 did not end"), jobs.paused(timeout=0.05):
        pass
    with pytest.raises(TimeoutError, match="iteration 3 did not end"):
        jobs.clear(0.05)
    release.set()
    jobs.submit(5, lambda: 1)  # those before were forgotten
    assert jobs.result(5, timeout=LIMIT) == 1


def test_what_is_held_when_a_pause_begins_inside_another_stays_held() -> None:
    jobs, ran = Jobs[int](), list[int]()
    with jobs.paused(LIMIT):
        jobs.submit(0, lambda: ran.append(0) or 5)  # type: ignore[func-returns-value]
        with jobs.paused(LIMIT):
            pass
        time.sleep(0.005)
        assert not ran
    assert jobs.result(0, timeout=LIMIT) == 5
