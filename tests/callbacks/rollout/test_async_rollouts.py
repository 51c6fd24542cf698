"""Asynchronous rollouts: what is trained on, how old it may be, and what overlaps; ranks are in ``test_sharing.py``.

Covers ``parts/ahead.py`` and ``timing.py`` of ``callbacks/rollout/``.
"""

import itertools
import json
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rl_runs import (
    Iterations,
    digits,
    fit_run,
    setup_run,
)
from waiting import LIMIT

from rlhfkit import Ahead, Invariants, LocalEngine, Oversampling, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.parts.ahead import Jobs
from rlhfkit.callbacks.rollout.timing import MOST_EVENTS, Timing

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)


def ages(watch: Iterations) -> list[list[int]]:
    """Of the tokens of each iteration, in updates, when training on it began."""
    return [
        sorted({begin - version for one in samples for version in one.versions.tolist()})
        for begin, samples in zip(watch.began, watch.samples, strict=True)
    ]


class Handshake:
    """Generating and training that wait for each other: neither ends unless they overlap."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.begun = [threading.Event() for _ in range(last + 1)]
        self.training = [threading.Event() for _ in range(last + 1)]

    def generating(self, iteration: int) -> None:
        self.begun[iteration].set()
        if iteration > 0:
            assert self.training[iteration - 1].wait(LIMIT), "training has not begun"

    def train(self, iteration: int) -> None:
        self.training[iteration].set()
        if iteration < self.last:
            assert self.begun[iteration + 1].wait(LIMIT), "generating has not begun"


class Training(Iterations):
    """Tells the handshake that an iteration is being trained on."""

    def __init__(self, handshake: Handshake) -> None:
        super().__init__()
        self.handshake = handshake

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.handshake.train(trainer.current_epoch)


def test_generating_overlaps_with_training_on_the_same_prompts_and_is_as_old_as_allowed(tmp_path: Path) -> None:
    handshake = Handshake(last=3)
    turns, watch = Iterations(), Training(handshake)
    fit_run(tmp_path, callbacks=[turns], max_epochs=4)

    class Engine(LocalEngine):
        def generate(self, prompts: Any, sampling: Any, *, iteration: int) -> list[Sample]:
            handshake.generating(iteration)
            return super().generate(prompts, sampling, iteration=iteration)

    rollouts = RolloutCallback(digits, engine=Engine(), sampling=SAMPLING, parts=[Ahead(1)])
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, callbacks=[watch], max_epochs=handshake.last + 1)
    assert rollouts.overlaps
    assert watch.prompts == turns.prompts
    assert watch.tokens[0] == turns.tokens[0]  # of the first iteration, which is never stale
    # Each is sampled from the policy before the iteration that is trained on meanwhile, of two updates.
    assert ages(watch) == [[0], [2], [2], [2]]
    assert ages(turns) == [[0]] * 4
    assert trainer.callback_metrics["rollout/staleness"] == 2.0
    assert [event.iteration for event in rollouts.timing.events if event.name == "generate"] == [0, 1, 2, 3]
    assert float(trainer.callback_metrics["time/generate"]) > 0
    path = rollouts.timing.write_trace(tmp_path / "trace.json")
    assert {"generate", "score", "wait", "prepare", "weight_sync"} <= {
        event["name"] for event in json.loads(path.read_text())["traceEvents"]
    }


class HalfWay(LocalEngine):
    """Generates four tokens of an iteration, and the rest when the weights of the one before have changed."""

    def __init__(self, handshake: Handshake, updates: int) -> None:
        super().__init__()
        self.handshake = handshake
        self.updates = updates  # per iteration
        self.published = threading.Condition()

    def load(self, weights: Any, version: int) -> None:
        super().load(weights, version)
        with self.published:
            self.published.notify_all()

    def decode(self, rows: Any, sampling: SamplingSpec, iteration: int, begun: Any = ()) -> Any:
        decoding = super().decode(rows, sampling, iteration, begun)
        weights, steps = decoding._weights, itertools.count()

        def in_step() -> Any:
            if next(steps) == 4 and iteration > 0:
                self.handshake.generating(iteration)
                with self.published:
                    newer = self.published.wait_for(lambda: (self.version or 0) >= self.updates * iteration, LIMIT)
                assert newer, "publishing waits for what is being sampled"
            return weights()

        decoding._weights = in_step
        return decoding


def test_in_flight_samples_go_on_with_new_weights_and_know_it(tmp_path: Path) -> None:
    """Four tokens of each sample are from one policy and four from the next.

    That their log-probs are those of just these policies is in ``rollout/local/test_generator.py``.
    """
    handshake = Handshake(last=3)
    training = Training(handshake)
    sampling = SamplingSpec(group_size=4, max_new_tokens=8, min_new_tokens=8)
    rollouts = RolloutCallback(
        digits, engine=HalfWay(handshake, updates=2), sampling=sampling, parts=[Ahead(1, in_flight=True)]
    )
    trainer, *_ = fit_run(
        tmp_path,
        rollouts=rollouts,
        callbacks=[training, Invariants()],
        max_epochs=handshake.last + 1,
        module_arguments={"lr": 1e-2},
    )
    assert trainer.callback_metrics["rollout/staleness"] == 1.0  # half of the tokens are two updates old
    assert trainer.callback_metrics["rollout/mixed_fraction"] == 1.0
    expected = [[0] * 8, [0] * 4 + [2] * 4, [2] * 4 + [4] * 4, [4] * 4 + [6] * 4]
    assert [samples[0].versions.tolist() for samples in training.samples] == expected


def test_an_error_while_sampling_ahead_ends_the_run_with_that_error(tmp_path: Path) -> None:
    calls: list[int] = []

    def broken_later(samples: Sequence[Sample]) -> list[float]:
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("the reward is broken")
        return digits(samples)

    rollouts = RolloutCallback(broken_later, sampling=SAMPLING, parts=[Ahead(2)])
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, max_epochs=6)
    with pytest.raises(ArithmeticError, match="the reward is broken"):
        trainer.fit(module, data)
    assert trainer.current_epoch == 2


def test_ranks_that_have_an_engine_each_take_no_part_of_an_iteration_first() -> None:
    part = Oversampling(0.5)
    RolloutCallback(digits, parts=[part])
    part.check(SimpleNamespace(world_size=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="an engine in each of 2 ranks"):  # no place sees which group is first
        part.check(SimpleNamespace(world_size=2))  # type: ignore[arg-type]


def test_times_of_a_long_run_are_bounded_and_their_sums_are_those_of_all_phases() -> None:
    timing = Timing()
    for iteration in range(2 * MOST_EVENTS // 10):
        for phase in range(10):
            start = iteration + phase / 20
            timing._add(f"phase {phase}", start, start + 0.01, "thread", iteration)
    assert len(timing.events) == MOST_EVENTS
    assert timing.events[-1].iteration == 1999
    assert timing.metrics(1999) == pytest.approx({f"time/phase {phase}": 0.01 for phase in range(10)})
    assert timing.metrics(0) == {}  # forgotten
    for part in range(3 * MOST_EVENTS):  # more phases than are kept, in one iteration
        timing._add("generate", start=part, end=part + 0.5, thread=str(part % 2), iteration=2000)
    timing.note({"generate": 1.0, "logprobs_elsewhere": 2.0}, iteration=2000)
    again = pickle.loads(pickle.dumps(timing))
    for one in (timing, again):
        assert one.metrics(2000) == pytest.approx(
            {"time/generate": 1.5 * MOST_EVENTS + 1, "time/logprobs_elsewhere": 2.0}
        )
    # A phase that is looked at in between is one phase, and counts once.
    for start in (0.0, 0.5, 1.0):
        timing._add("wait", start=start, end=start + 0.5, thread="t", iteration=2001)
    assert timing.metrics(2001) == pytest.approx({"time/wait": 1.5})
    assert timing.events[-1].seconds == pytest.approx(1.5)


# ---------------------------------------------------------------- jobs beside the training loop


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
