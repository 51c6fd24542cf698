"""Jobs beside the training loop: none lost, none run twice, in order, and never while they are paused."""

import pickle
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.rollout.background import BackgroundRollouts


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["submit", "collect", "hold"]), max_size=40))
def test_every_job_runs_once_and_in_order_whatever_happens_around_it(actions: list[str]) -> None:
    jobs: BackgroundRollouts[int] = BackgroundRollouts()
    ran: list[int] = []
    submitted, collected = 0, 0

    def job(number: int) -> int:
        ran.append(number)
        return 10 * number

    for action in actions:
        if action == "submit":
            jobs.submit(submitted, lambda number=submitted: job(number))
            jobs.submit(submitted, lambda: -1)  # a second one of that number is not run
            submitted += 1
        elif action == "collect" and collected < submitted:
            assert jobs.result(collected, timeout=10) == 10 * collected
            collected += 1
        elif action == "hold":
            with jobs.paused(timeout=10):
                before = len(ran)
                time.sleep(0.001)
                assert len(ran) == before
    assert jobs.pending == list(range(collected, submitted))
    while collected < submitted:
        assert jobs.result(collected, timeout=10) == 10 * collected
        collected += 1
    assert ran == list(range(submitted))
    jobs.close()


def test_who_holds_may_have_jobs_run_first() -> None:
    """Two processes run their jobs together; one is held before it begins a job that the other has begun already."""
    jobs: BackgroundRollouts[int] = BackgroundRollouts()
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
    jobs.close()


def test_an_error_is_raised_where_the_result_is_asked_for_and_the_next_job_runs() -> None:
    jobs: BackgroundRollouts[int] = BackgroundRollouts()

    def broken() -> int:
        raise ArithmeticError("the reward is broken")

    jobs.submit(0, broken)
    jobs.submit(1, lambda: 5)
    with pytest.raises(ArithmeticError, match="the reward is broken"):
        jobs.result(0, timeout=10)
    assert jobs.result(1, timeout=10) == 5
    jobs.close()


def test_every_wait_has_a_limit_and_says_what_it_waited_for() -> None:
    jobs: BackgroundRollouts[int] = BackgroundRollouts()
    release = threading.Event()
    jobs.submit(3, lambda: int(release.wait(30)))
    jobs.submit(4, lambda: 1)
    with pytest.raises(TimeoutError, match=r"iteration 3 took longer than 0\.05 s: still running"):
        jobs.result(3, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"iteration 4 .* waiting behind job 3"):
        jobs.result(4, timeout=0.05)
    with pytest.raises(TimeoutError, match="iteration 3 did not end"), jobs.paused(timeout=0.05):
        pass
    with pytest.raises(KeyError, match="never submitted"):
        jobs.result(9, timeout=0.05)
    release.set()
    assert jobs.result(4, timeout=10) == 1
    jobs.close()
    with pytest.raises(RuntimeError, match="closed"):
        jobs.submit(5, lambda: 1)


def test_a_copy_for_another_process_starts_empty() -> None:
    jobs: BackgroundRollouts[int] = BackgroundRollouts("mine")
    jobs.submit(0, lambda: 1)
    copy = pickle.loads(pickle.dumps(jobs))
    assert copy.pending == []
    copy.submit(0, lambda: 2)
    assert (jobs.result(0, timeout=10), copy.result(0, timeout=10)) == (1, 2)
    jobs.close()
    copy.close()


def test_who_waits_while_another_thread_closes_is_told_so() -> None:
    jobs: BackgroundRollouts[int] = BackgroundRollouts()
    begun, finish, waiting = threading.Event(), threading.Event(), threading.Event()

    def job() -> int:
        begun.set()
        finish.wait(10)
        return 1

    jobs.submit(0, job)
    assert begun.wait(10)
    told: list[BaseException] = []

    def wait() -> None:
        waiting.set()
        try:
            jobs.result(0, timeout=10)
        except BaseException as error:
            told.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    assert waiting.wait(10)
    closer = threading.Thread(target=jobs.close)
    closer.start()
    finish.set()
    waiter.join(10)
    closer.join(10)
    assert [str(error) for error in told] == ["these background rollouts were closed while job 0 was waited for"]
    with pytest.raises(RuntimeError, match="were closed while job 0"):
        jobs.result(0, timeout=1)
