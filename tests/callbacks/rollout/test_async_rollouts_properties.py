"""Asynchronous rollouts with any staleness and any stops: no prompt lost or repeated, no sample older than allowed."""

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit import DynamicSampling, Prompt, Sample, SamplingSpec
from rlhfkit.callbacks.rollout.async_rollouts import AsyncRollouts
from rlhfkit.callbacks.rollout.group_collector import GroupCollector
from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.datamodules.prompts.cursor import IterationQueue, PromptCursor, PromptOrder

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


class Data:
    """The part of a DataModule that rollouts use."""

    def __init__(self) -> None:
        self.order, self.cursor = PromptOrder(TOTAL, seed=4), PromptCursor()

    def prompt_queue(self, after: dict[str, Any] | None = None) -> IterationQueue:
        cursor = self.cursor if after is None else PromptCursor.from_state_dict(after)
        return IterationQueue(self.order, lambda row: Prompt(row, [5]), cursor)

    def set_cursor(self, after: dict[str, Any]) -> None:
        self.cursor = PromptCursor.from_state_dict(after)


def reward(samples: Sequence[Sample]) -> list[float]:
    """Prompts whose row divides by three teach nothing."""
    return [float(sample.sample_index * (sample.prompt.index % 3)) for sample in samples]


@settings(deadline=None, max_examples=40)
@given(
    staleness=st.integers(0, 3),
    in_flight=st.booleans(),
    select=st.booleans(),
    iterations=st.integers(1, 6),
    stops=st.sets(st.integers(0, 5)),
)
def test_a_run_ahead_is_trained_on_what_a_run_that_takes_turns_is(
    staleness: int, in_flight: bool, select: bool, iterations: int, stops: set[int]
) -> None:
    def run(staleness: int, stops: set[int]) -> list[list[int]]:
        engine, data = Engine(), Data()
        tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids))
        trainer = SimpleNamespace(
            world_size=1,
            global_rank=0,
            max_epochs=iterations,
            current_epoch=0,
            datamodule=data,
            lightning_module=SimpleNamespace(tokenizer=tokenizer, scores_samples=False),
        )
        selection = DynamicSampling() if select else None
        collector = GroupCollector(engine, reward, Timing(), selection)  # type: ignore[arg-type]
        ahead = AsyncRollouts(collector, staleness, 30.0, in_flight=in_flight) if staleness else None
        trained: list[list[int]] = []
        for iteration in range(iterations):
            trainer.current_epoch = iteration
            if ahead is None:
                engine.version = iteration
                filled = collector.collect(trainer, WANTED, SPEC, iteration)
            else:
                with ahead.updating_weights(trainer):
                    assert in_flight or not engine.busy
                    engine.version = iteration
                filled = ahead.collect(trainer, WANTED, SPEC, iteration)
                assert len(ahead._jobs.pending) <= staleness  # what waits, besides what is trained on
            samples = [sample for group in filled.groups for sample in group]
            assert all(iteration - staleness <= each <= iteration for sample in samples for each in sample.versions)
            assert {sample.token_ids[1] for sample in samples} == {iteration}  # the seeds of this iteration
            assert in_flight or all(len(set(sample.versions)) == 1 for sample in samples)
            trained.append([group[0].prompt.index for group in filled.groups])
            data.set_cursor(filled.after)
            if ahead is not None and iteration in stops:  # killed, and resumed from a checkpoint of this moment
                ahead.close()
                ahead = ahead.fresh()
        if ahead is not None:
            assert ahead._jobs.pending == []
            ahead.close()
        return trained

    assert run(staleness, stops) == run(0, set())
