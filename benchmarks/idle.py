"""Share of time in which the slots of an engine are idle, with answers of very different lengths.

Real ``AsyncRollouts`` and ``GroupCollector`` drive an engine whose slots sleep for each answer: lengths are lognormal,
the 99th percentile ten times the median, cut at 25 times the median. Training sleeps for a fifth of the time that the
slots need for an iteration. Compared in one run: taking turns; sampling ahead one iteration after another; sampling
ahead with the requests of both iterations out (``continuous_batching``); the last also where dynamic sampling rejects
every third group and samples another in its place, and with ``oversampling`` of a quarter, which throws away what it
drops or continues it (``partial_rollouts``; what is computed again to continue is not counted). Prints one JSON line.

    python benchmarks/idle.py
"""

import itertools
import json
import math
import queue
import random
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from rlhfkit import DynamicSampling, Prompt, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.async_rollouts import AsyncRollouts
from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder
from rlhfkit.rollout.engine import sample_seed

SLOTS, GROUP = 16, 8
MEDIAN_SECONDS = 0.012
SIGMA = math.log(10) / 2.3263  # of the lognormal whose 99th percentile is ten times its median
LONGEST = 25.0  # times the median
TOKEN_SECONDS = 1e-4


def seconds_of(iteration: int, prompt: int, place: int) -> float:
    """How long an answer takes."""
    chance = random.Random(sample_seed(0, iteration, prompt, place))
    return MEDIAN_SECONDS * min(math.exp(chance.gauss(0.0, SIGMA)), LONGEST)


class SleepingEngine:
    """Slots that sleep for each answer; earlier iterations are served first, as by a ``VLLMPool``."""

    shared = False
    updates_in_flight = True
    can_stream = True
    version = 0

    def __init__(self, continuous_batching: bool) -> None:
        self.continuous_batching = continuous_batching
        self.begun: dict[tuple[int, int], float] = {}  # seconds of answers that were cut and are continued
        self.thrown_away = 0.0  # seconds
        self.requests: queue.PriorityQueue[Any] = queue.PriorityQueue()
        self.numbers = itertools.count()
        self.busy: list[tuple[float, float]] = []
        for _ in range(SLOTS):
            threading.Thread(target=self._slot, daemon=True).start()

    def _slot(self) -> None:
        while (request := self.requests.get()[-1]) is not None:
            stream, iteration, prompt, place, before = request
            whole = self.begun.get((prompt.index, place)) if before else None
            whole = seconds_of(iteration, prompt.index, place) if whole is None else whole
            start = time.perf_counter()
            was_cut = stream.ended.wait(max(whole - before * TOKEN_SECONDS, 0.0))
            end = time.perf_counter()
            self.busy.append((start, end))
            if was_cut:
                self.begun[prompt.index, place] = whole
            count = before + max(1, round((end - start) / TOKEN_SECONDS))
            ids, logprobs, versions = [5] * count, [0.0] * count, [self.version] * count
            stream.finish(prompt, Sample(prompt, place, ids, logprobs, versions, "abort" if was_cut else "stop"))

    def resume_problem(self, sampling: SamplingSpec) -> None:
        """Answers can be continued."""

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "SleepingStream":
        return SleepingStream(self, iteration)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        stream, groups = self.stream(sampling, iteration=iteration), {}
        stream.submit(prompts)
        while len(groups) < len(prompts):
            groups |= {group[0].prompt.index: group for group in stream.collect(len(prompts))}
        return [sample for prompt in prompts for sample in groups[prompt.index]]

    def idle_share(self, start: float, end: float) -> float:
        """Share of the slots' time between two moments."""
        spent = sum(max(min(last, end) - max(first, start), 0.0) for first, last in self.busy)
        return 1.0 - spent / (SLOTS * (end - start))


class SleepingStream:
    def __init__(self, engine: SleepingEngine, iteration: int) -> None:
        self.engine, self.iteration = engine, iteration
        self.groups: dict[int, list[Sample]] = {}
        self.left: set[int] = set()  # prompts of groups that were not collected
        self.waiting = 0  # requests without an answer
        self.ended = threading.Event()
        self.finished: queue.SimpleQueue[list[Sample]] = queue.SimpleQueue()
        self.lock = threading.Lock()

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        for prompt in prompts:
            self.start(prompt, dict.fromkeys(range(GROUP), 0))

    def start(self, prompt: Prompt, places: dict[int, int]) -> None:
        """Ask for answers, of which so many tokens are there."""
        with self.lock:
            self.left.add(prompt.index)
            self.waiting += len(places)
        for place, before in places.items():
            request = self, self.iteration, prompt, place, before
            self.engine.requests.put((self.iteration, next(self.engine.numbers), request))

    def resume(self, groups: Sequence[list[Sample]], *, iteration: int | None = None) -> None:
        for group in groups:
            whole = [sample for sample in group if sample.finish_reason == "stop"]
            begun = {sample.sample_index: sample.num_tokens for sample in group if sample.finish_reason == "abort"}
            missing = {*range(GROUP)} - {sample.sample_index for sample in whole}
            self.groups[group[0].prompt.index] = whole
            self.start(group[0].prompt, {place: begun.get(place, 0) for place in missing})
            if len(whole) == GROUP:
                self.finished.put(whole)

    def cut(self) -> list[list[Sample]]:
        self.ended.set()
        while self.waiting:
            time.sleep(0.0005)
        return [self.groups[index] for index in self.left]

    def finish(self, prompt: Prompt, sample: Sample) -> None:
        with self.lock:
            self.waiting -= 1
            group = self.groups.setdefault(prompt.index, [])
            group.append(sample)
            if len(group) == GROUP:
                self.finished.put(sorted(group, key=lambda one: one.sample_index))

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        try:
            group = self.finished.get(timeout=wait)
        except queue.Empty:
            return []
        self.left.discard(group[0].prompt.index)
        return [group]

    def close(self) -> None:
        if not self.ended.is_set():
            dropped = self.cut()
            tokens = sum(sample.num_tokens for group in dropped for sample in group)
            self.engine.thrown_away += tokens * TOKEN_SECONDS


class Data:
    """Endless prompts."""

    curriculum_uses_rewards = False

    def __init__(self) -> None:
        self.order, self.cursor = PromptOrder(10_000, seed=4), PromptCursor()

    def prompt_queue(self, after: dict[str, Any] | None = None) -> IterationQueue:
        cursor = self.cursor if after is None else PromptCursor.from_state_dict(after)
        return IterationQueue(self.order, lambda row: Prompt(row, [5]), cursor)

    def set_cursor(self, after: dict[str, Any]) -> None:
        self.cursor = PromptCursor.from_state_dict(after)


def reward(samples: Sequence[Sample]) -> list[float]:
    """Every third prompt teaches nothing."""
    return [float(sample.sample_index * (sample.prompt.index % 3)) for sample in samples]


def measure(
    wanted: int,
    staleness: int,
    continuous_batching: bool,
    *,
    select: bool = False,
    oversampling: float = 0.0,
    partial: bool = False,
    iterations: int = 10,
) -> dict[str, float]:
    """Idle share and iterations per second, without the first two iterations.

    ``select``: replace rejected groups. ``partial``: continue what ``oversampling`` drops.
    """
    engine, data = SleepingEngine(continuous_batching), Data()
    module = SimpleNamespace(
        tokenizer=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)), scores_samples=False
    )
    trainer: Any = SimpleNamespace(
        world_size=1,
        global_rank=0,
        max_epochs=-1,
        current_epoch=0,
        global_step=0,
        datamodule=data,
        lightning_module=module,
    )
    selection = DynamicSampling() if select else None
    collector = GroupCollector(engine, reward, Timing(), selection, oversampling)  # type: ignore[arg-type]
    ahead = AsyncRollouts(collector, staleness, 600.0, in_flight=True) if staleness else None
    spec = SamplingSpec(group_size=GROUP, max_new_tokens=100_000)
    if partial:
        collector.continue_dropped(spec)
    training = 0.2 * wanted * GROUP * MEDIAN_SECONDS * math.exp(SIGMA**2 / 2) / SLOTS
    start = 0.0
    for iteration in range(iterations):
        if iteration == 2:
            start, engine.thrown_away = time.perf_counter(), 0.0
        collected = (ahead or collector).collect(trainer, wanted, spec, iteration)
        time.sleep(training)
        data.set_cursor(collected.after)
    end = time.perf_counter()
    share = engine.idle_share(start, end)
    if ahead is not None:
        ahead.close()
    for _ in range(SLOTS):
        engine.requests.put((math.inf, next(engine.numbers), None))
    numbers = {"idle_share": round(share, 4), "iterations_per_second": round((iterations - 2) / (end - start), 3)}
    if oversampling:
        numbers["thrown_away_share"] = round(engine.thrown_away / (SLOTS * (end - start)), 4)
    return numbers


def main() -> None:
    """Print the measurements for iterations that give each slot few or many answers."""
    report: dict[str, Any] = {"benchmark": "idle", "slots": SLOTS}
    for per_slot in (4, 16, 32):
        wanted = per_slot * SLOTS // GROUP
        report[f"{per_slot} answers a slot"] = {
            "in turns": measure(wanted, 0, True),
            "ahead by 1, one after another": measure(wanted, 1, False),
            "ahead by 1, requests of both out": measure(wanted, 1, True),
            "ahead by 3, requests of all out": measure(wanted, 3, True),
        }
    for per_slot in (4, 16):
        wanted = per_slot * SLOTS // GROUP
        report[f"{per_slot} answers a slot, oversampling a quarter"] = {
            "in turns": measure(wanted, 0, True, oversampling=0.25),
            "in turns, continued": measure(wanted, 0, True, oversampling=0.25, partial=True),
            "ahead by 1": measure(wanted, 1, True, oversampling=0.25),
            "ahead by 1, continued": measure(wanted, 1, True, oversampling=0.25, partial=True),
        }
    report["16 answers a slot, dynamic sampling rejects a third"] = {
        "in turns": measure(32, 0, True, select=True),
        "ahead by 1, one after another": measure(32, 1, False, select=True),
        "ahead by 1, requests of both out": measure(32, 1, True, select=True),
        "ahead by 3, requests of all out": measure(32, 3, True, select=True),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
