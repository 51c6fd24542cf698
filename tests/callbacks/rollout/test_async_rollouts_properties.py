"""Asynchronous rollouts with any staleness and any stops: no prompt lost or repeated, no sample older than allowed."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from datamodules.prompts.drawing import numbered
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit import DynamicSampling, Prompt, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.parts.ahead import Ahead
from rlhfkit.callbacks.rollout.source import Ask, GroupCollector
from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor

TOTAL, WANTED = 11, 3
SPEC = SamplingSpec(group_size=2, max_new_tokens=3)


class Engine:
    """Samples of three tokens, each labelled with the version at its time."""

    shared = False
    updates_in_flight = True
    can_stream = False
    continuous_batching = False
    version = 0
    busy = False

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        self.busy = True
        versions = []
        for _ in range(3):
            versions.append(self.version)
            time.sleep(0.0003)
        self.busy = False
        return [
            Sample(prompt, index, [5, iteration, 5], [0.0] * 3, list(versions), "stop")
            for prompt in prompts
            for index in range(2)
        ]


class StreamingEngine(Engine):
    """Has the groups of several iterations in flight; they end in any order."""

    can_stream = True
    continuous_batching = True

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.streams: list[Stream] = []

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return any(stream.pending for stream in self.streams)

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> "Stream":
        self.streams.append(Stream(self, iteration))
        return self.streams[-1]


class Stream:
    """Groups that end one at a time."""

    def __init__(self, engine: StreamingEngine, iteration: int) -> None:
        self.engine, self.iteration = engine, iteration
        self.pending: list[tuple[Prompt, int]] = []

    def submit(self, prompts: Sequence[Prompt], *, iteration: int | None = None) -> None:
        self.pending += [(prompt, self.iteration if iteration is None else iteration) for prompt in prompts]

    def collect(self, most: int, *, wait: float | None = None) -> list[list[Sample]]:
        time.sleep(self.engine.chance.random() * 0.002)
        if not self.pending:
            return []
        one = self.engine.chance.choice(self.pending)
        self.pending.remove(one)
        prompt, iteration = one
        tokens, versions = [5, iteration, 5], [self.engine.version] * 3
        return [[Sample(prompt, index, tokens, [0.0] * 3, versions, "stop") for index in range(2)]]

    def close(self) -> None:
        self.pending.clear()


class Data:
    """The part of a DataModule that rollouts use."""

    curriculum_uses_rewards = False

    def __init__(self) -> None:
        self.order, self.cursor = numbered(TOTAL, seed=4), PromptCursor()

    def prompt_queue(self, after: dict[str, Any] | None = None) -> IterationQueue:
        cursor = self.cursor if after is None else PromptCursor.from_state_dict(after)
        return IterationQueue(self.order, cursor)

    def set_cursor(self, after: dict[str, Any]) -> None:
        self.cursor = PromptCursor.from_state_dict(after)


def reward(samples: Sequence[Sample]) -> list[float]:
    """Prompts whose row divides by three teach nothing."""
    return [float(sample.sample_index * (sample.prompt.index % 3)) for sample in samples]


Trained = list[list[int]]
"""Prompts of each iteration."""


def play(
    engine: Engine,
    staleness: int,
    iterations: int,
    *,
    in_flight: bool = True,
    select: bool = False,
    stops: set[int] = frozenset(),  # type: ignore[assignment]
    score: Any = reward,
) -> tuple[Trained, PromptCursor]:
    """Train; ``stops`` are iterations after which the run is killed and resumed. Also returns the last cursor."""
    data = Data()
    tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
    trainer: Any = SimpleNamespace(
        world_size=1,
        global_rank=0,
        max_epochs=iterations,
        current_epoch=0,
        global_step=0,
        datamodule=data,
        lightning_module=SimpleNamespace(tokenizer=tokenizer, scorer=None),
    )
    collector = GroupCollector(engine, score, Timing())  # type: ignore[arg-type]
    rollouts: Any = SimpleNamespace(collector=collector, rollout_timeout=30.0)
    if select:
        DynamicSampling().attach(rollouts)
    ahead = Ahead(staleness, in_flight=in_flight) if staleness else None
    if ahead is not None:
        ahead.attach(rollouts)
    trained: Trained = []
    drawn = 0
    for iteration in range(iterations):
        trainer.current_epoch = iteration
        if ahead is None:
            engine.version = iteration
            filled = collector.collect(Ask(trainer, iteration, WANTED, SPEC))
        else:
            with ahead.updating_weights(trainer):
                assert in_flight or not engine.busy
                engine.version = iteration
            filled = ahead.collect(Ask(trainer, iteration, WANTED, SPEC))
            assert len(ahead._jobs.pending) <= staleness  # what waits, besides what is trained on
        samples = [sample for group in filled.groups for sample in group]
        assert all(
            iteration - staleness <= each <= iteration for sample in samples for each in sample.versions.tolist()
        )
        # The seeds of this iteration; where groups are in flight beside its own, those of the place in the stream.
        seeds = range(drawn, drawn + filled.sampled) if engine.continuous_batching and ahead else [iteration * WANTED]
        assert {sample.token_ids.tolist()[1] for sample in samples} <= {place // WANTED for place in seeds}
        drawn += filled.sampled
        assert in_flight or all(len(set(sample.versions.tolist())) == 1 for sample in samples)
        trained.append([group[0].prompt.index for group in filled.groups])
        data.set_cursor(filled.after)
        if ahead is not None:
            ahead.end_iteration(iteration + 1)
        if ahead is not None and iteration in stops:  # killed, and resumed from a checkpoint of this moment
            state = ahead.state_dict(iteration + 1)
            ahead.close()
            ahead.clear()
            ahead.load_state_dict(state, state, rank=0, world_size=1)

    if ahead is not None:
        assert not ahead._jobs.pending
        ahead.close()
    return trained, data.cursor


@settings(deadline=None, max_examples=60)
@given(
    staleness=st.integers(0, 3),
    in_flight=st.booleans(),
    select=st.booleans(),
    iterations=st.integers(1, 6),
    stops=st.sets(st.integers(0, 5)),
    seeds=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_a_run_ahead_is_trained_on_what_a_run_that_takes_turns_is_whatever_ends_first(
    staleness: int, in_flight: bool, select: bool, iterations: int, stops: set[int], seeds: tuple[int, int] | None
) -> None:
    """By an engine that makes one iteration after the other (``seeds=None``), or one with several in flight."""
    used = Counter[int]()

    def score(samples: Sequence[Sample]) -> list[float]:
        used.update(sample.prompt.index for sample in samples if sample.sample_index == 0)
        return reward(samples)

    straight, stopping = (Engine(), Engine()) if seeds is None else map(StreamingEngine, seeds)
    whole, end = play(straight, staleness, iterations, in_flight=in_flight, select=select, score=score)
    stopped, _ = play(stopping, staleness, iterations, in_flight=in_flight, select=select, stops=stops)
    assert stopped == whole
    assert whole == play(Engine(), 0, iterations, select=select)[0]
    if seeds is None:
        return
    # Nothing is lost or doubled: what was decided, and what comes next, is every row that the passes went over.
    passes = [numbered(TOTAL, seed=4)._permutation(number) for number in range(end.number + 1)]
    gone_over = [*itertools.chain.from_iterable(passes[:-1]), *passes[-1][: end.offset]]
    assert used + Counter(end.postponed) == Counter(gone_over)


def test_groups_start_ahead_unless_what_is_drawn_depends_on_rewards_or_on_what_ends_first() -> None:
    data, collector = Data(), GroupCollector(StreamingEngine(0), reward, Timing())  # type: ignore[arg-type]
    trainer: Any = SimpleNamespace(datamodule=data)
    assert collector.starts_ahead(trainer)
    collector.spare_share = 0.5
    assert not collector.starts_ahead(trainer)
    collector.spare_share, data.curriculum_uses_rewards = 0.0, True
    assert not collector.starts_ahead(trainer)
