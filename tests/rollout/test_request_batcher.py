"""Batching of requests: large batches for an engine in this process, many small calls for a shared one."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.request_batcher import EngineFailedError, RequestBatcher


class Timed:
    """An engine that takes as many milliseconds for a call as its longest prompt has tokens, and notes what it does."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.calls: list[int] = []
        self.running = 0
        self.most = 0
        self.lock = threading.Lock()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        with self.lock:
            self.calls.append(len(prompts))
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(max(len(prompt.token_ids) for prompt in prompts) / 1000)
        with self.lock:
            self.running -= 1
        if any(prompt.token_ids.tolist()[0] == 0 for prompt in prompts):
            raise ZeroDivisionError("a zero")
        return [Sample(prompt, 0, [len(prompt.token_ids)], [0.0], [0], "stop") for prompt in prompts]


SPEC = SamplingSpec(group_size=1)


def asked(sampler: RequestBatcher, length: int, spec: SamplingSpec = SPEC) -> Any:
    return sampler.ask(Prompt(length, [1] * length), spec, iteration=0)


def test_a_wave_waits_for_who_is_nearly_ready_and_not_for_who_is_not() -> None:
    engine = Timed(shared=False)

    async def episode(sampler: RequestBatcher, delay: float) -> None:
        with sampler.requesters.one_more():
            await asyncio.sleep(delay)
            await asked(sampler, 1)

    async def run() -> None:
        sampler = RequestBatcher(engine, max_wait=0.5)  # type: ignore[arg-type]
        await asyncio.gather(*(episode(sampler, delay) for delay in (0.0, 0.05, 0.1, 1.0)))

    asyncio.run(run())
    assert engine.calls == [3, 1]
    assert engine.most == 1


def test_a_slow_request_keeps_nobody_else_waiting_at_a_shared_engine() -> None:
    engine = Timed(shared=True)

    async def run() -> list[int]:
        sampler = RequestBatcher(engine)  # type: ignore[arg-type]
        order: list[int] = []

        async def one(length: int) -> None:
            (sample,) = await asked(sampler, length)
            order.extend(sample.token_ids.tolist())

        await asyncio.gather(*map(one, (500, 20, 10, 20, 10)))
        return order

    assert asyncio.run(run())[-1] == 500
    assert engine.calls == [1] * 5
    assert engine.most == 5


def test_calls_are_limited_and_share_what_is_waiting() -> None:
    engine = Timed(shared=True)

    async def run() -> None:
        sampler = RequestBatcher(engine, parallel_calls=2)  # type: ignore[arg-type]
        await asyncio.gather(*(asked(sampler, 50) for _ in range(9)))

    asyncio.run(run())
    assert engine.most == 2
    assert sorted(engine.calls) == [4, 5]


def test_only_what_is_sampled_alike_goes_in_one_call() -> None:
    engine = Timed(shared=False)
    other = SamplingSpec(group_size=1, max_new_tokens=3)

    async def run() -> None:
        sampler = RequestBatcher(engine, max_wait=0.05)  # type: ignore[arg-type]
        sampler.requesters.count = 4
        await asyncio.gather(*(asked(sampler, 1, spec) for spec in (SPEC, other, SPEC, other)))

    asyncio.run(run())
    assert engine.calls == [2, 2]


def test_an_error_of_the_engine_reaches_those_it_concerns() -> None:
    async def run() -> list[Any]:
        sampler = RequestBatcher(Timed(shared=True), parallel_calls=4)  # type: ignore[arg-type]
        bad = sampler.ask(Prompt(0, [0]), SPEC, iteration=0)
        return await asyncio.gather(bad, asked(sampler, 1), return_exceptions=True)

    failure, (sample,) = asyncio.run(run())
    assert isinstance(failure, EngineFailedError)
    assert isinstance(failure.__cause__, ZeroDivisionError)
    assert sample.token_ids.tolist() == [1]


def test_a_request_that_was_given_up_is_not_sent() -> None:
    engine = Timed(shared=False)

    async def run() -> None:
        sampler = RequestBatcher(engine, max_wait=0.1)  # type: ignore[arg-type]
        sampler.requesters.count = 3
        tasks = [asyncio.ensure_future(asked(sampler, 1)) for _ in range(2)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await tasks[1]

    asyncio.run(run())
    assert engine.calls == [1]
