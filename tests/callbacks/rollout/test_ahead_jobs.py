"""Jobs beside the training loop: none lost, none run twice, in order, and never while they are paused."""

import pickle
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.callbacks.rollout.parts.ahead import Jobs


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["submit", "collect", "hold"]), max_size=40))
def test_every_job_runs_once_and_in_order_whatever_happens_around_it(actions: list[str]) -> None:
    jobs = Jobs[int]()
    ran: list[int] = []
    submitted, collected = 0, 0

    def job(number: int) -> int:
        ran.append(number)
        return 10 * number

    for action in actions:
        if action == "submit":
            jobs.submit(submitted, lambda number=submitted: job(number))
            submitted += 1
        elif action == "collect" and collected < submitted:
            assert jobs.result(collected, timeout=10) == 10 * collected
            collected += 1
        elif action == "hold":
            with jobs.paused(timeout=10):
                before = len(ran)
                time.sleep(0.001)
                assert len(ran) == before
    while collected < submitted:
        assert jobs.result(collected, timeout=10) == 10 * collected
        collected += 1
    assert ran == list(range(submitted))
    jobs.clear(10)


def test_who_holds_may_have_jobs_run_first() -> None:
    """Two processes run their jobs together; one is held before it begins a job that the other has begun already."""
    jobs = Jobs[int]()
    ran: list[int] = []
    release = threading.Event()

    def job(number: int) -> int:
        if number == 3:
            release.wait(10)
        ran.append(number)
        return number

    for number in range(8):
        jobs.submit(number, lambda number=number: job(number))
    assert jobs.result(2, timeout=10) == 2  # the third is running or about to

    def others_are_at_5(mine: int) -> int:
        assert mine in (2, 3)
        release.set()
        return 5

    with jobs.paused(timeout=10, agree=others_are_at_5):
        assert ran == list(range(6))
        time.sleep(0.005)
        assert ran == list(range(6))
    assert jobs.result(7, timeout=10) == 7
    jobs.clear(10)


def test_an_error_is_raised_where_the_result_is_asked_for_and_the_next_job_runs() -> None:
    jobs = Jobs[int]()

    def broken() -> int:
        raise ArithmeticError("the reward is broken")

    jobs.submit(0, broken)
    jobs.submit(1, lambda: 5)
    with pytest.raises(ArithmeticError, match="the reward is broken"):
        jobs.result(0, timeout=10)
    assert jobs.result(1, timeout=10) == 5
    jobs.clear(10)


def test_every_wait_has_a_limit_and_says_what_it_waited_for() -> None:
    jobs = Jobs[int]()
    release = threading.Event()
    jobs.submit(3, lambda: int(release.wait(30)))
    jobs.submit(4, lambda: 1)
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
    assert jobs.result(5, timeout=10) == 1


def test_a_copy_for_another_process_starts_empty() -> None:
    jobs = Jobs[int]()
    jobs.submit(0, lambda: 1)
    copy = pickle.loads(pickle.dumps(jobs))
    copy.submit(0, lambda: 2)
    assert (jobs.result(0, timeout=10), copy.result(0, timeout=10)) == (1, 2)


def test_what_is_held_when_a_pause_begins_inside_another_stays_held() -> None:
    jobs, ran = Jobs[int](), list[int]()
    with jobs.paused(10):
        jobs.submit(0, lambda: ran.append(0) or 5)  # type: ignore[func-returns-value]
        with jobs.paused(10):
            pass
        time.sleep(0.005)
        assert not ran
    assert jobs.result(0, timeout=10) == 5
