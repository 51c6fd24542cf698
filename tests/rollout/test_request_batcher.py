"""Batching of requests: large batches for an engine in this process, many small calls for a shared one."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
from waiting import LIMIT

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.request_batcher import EngineFailedError, RequestBatcher

SPEC = SamplingSpec(group_size=1)


class Gated:
    """An engine that answers when a test lets it, and notes how many requests a call has."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.calls: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        """By the length of the prompt; others are answered at once."""

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        self.calls.append(len(prompts))
        for prompt in prompts:
            assert self.gates.get(prompt.num_tokens, PASSED).wait(LIMIT)
        if any(prompt.token_ids[0] == 0 for prompt in prompts):
            raise ZeroDivisionError("a zero")
        return [Sample(prompt, 0, [prompt.num_tokens], [0.0], [0], "stop") for prompt in prompts]

    async def until_called(self, times: int) -> None:
        async with asyncio.timeout(LIMIT):
            while len(self.calls) < times:
                await asyncio.sleep(0.001)


PASSED = threading.Event()
PASSED.set()


async def asked(sampler: RequestBatcher, length: int, spec: SamplingSpec = SPEC) -> int:
    """The length of the prompt, from its answer."""
    (sample,) = await sampler.ask(Prompt(length, [1] * length), spec, iteration=0)
    return int(sample.token_ids[0])


async def episode(sampler: RequestBatcher, steps: int = 0, spec: SamplingSpec = SPEC) -> None:
    """Asks after so many steps."""
    with sampler.requesters.one_more():
        for _ in range(steps):
            await asyncio.sleep(0)
        await asked(sampler, 1, spec)


def test_a_wave_waits_for_who_is_nearly_ready_and_not_for_who_is_not() -> None:
    engine = Gated(shared=False)

    async def run() -> None:
        sampler = RequestBatcher(engine, max_wait=0.5)  # type: ignore[arg-type]

        async def late() -> None:
            with sampler.requesters.one_more():
                await engine.until_called(1)
                await asked(sampler, 1)

        await asyncio.gather(*(episode(sampler, steps) for steps in (0, 3, 5)), late())

    asyncio.run(run())
    assert engine.calls == [3, 1]


def test_a_slow_or_failing_request_keeps_nobody_else_from_an_answer_of_a_shared_engine() -> None:
    engine = Gated(shared=True)
    engine.gates = {500: threading.Event()}

    async def run() -> None:
        sampler = RequestBatcher(engine)  # type: ignore[arg-type]
        slow = asyncio.ensure_future(asked(sampler, 500))
        bad = asyncio.ensure_future(sampler.ask(Prompt(0, [0]), SPEC, iteration=0))
        assert await asyncio.gather(*(asked(sampler, length) for length in (20, 10, 20, 10))) == [20, 10, 20, 10]
        with pytest.raises(EngineFailedError) as raised:
            await bad
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert not slow.done()
        engine.gates[500].set()
        assert await slow == 500

    asyncio.run(run())
    assert engine.calls == [1] * 6


def test_calls_are_limited_and_share_what_is_waiting() -> None:
    engine = Gated(shared=True)
    engine.gates = {5: threading.Event()}

    async def run() -> None:
        sampler = RequestBatcher(engine, parallel_calls=2)  # type: ignore[arg-type]
        first = [asyncio.ensure_future(asked(sampler, 5)) for _ in range(9)]
        await engine.until_called(2)
        further = [asyncio.ensure_future(asked(sampler, 6)) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert sorted(engine.calls) == [4, 5]
        engine.gates[5].set()
        await asyncio.gather(*first, *further)

    asyncio.run(run())
    assert sum(engine.calls) == 12


def test_only_what_is_sampled_alike_goes_in_one_call() -> None:
    engine = Gated(shared=False)
    other = SamplingSpec(group_size=1, max_new_tokens=3)

    async def run() -> None:
        sampler = RequestBatcher(engine, max_wait=LIMIT)  # type: ignore[arg-type]
        await asyncio.gather(*(episode(sampler, spec=spec) for spec in (SPEC, other, SPEC, other)))

    asyncio.run(run())
    assert engine.calls == [2, 2]


def test_a_request_that_was_given_up_is_not_sent() -> None:
    engine = Gated(shared=False)

    async def run() -> None:
        sampler = RequestBatcher(engine, max_wait=LIMIT)  # type: ignore[arg-type]
        sampler.requesters.count = 3
        given_up, *tasks = [asyncio.ensure_future(asked(sampler, 1)) for _ in range(2)]
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(*tasks, asked(sampler, 1))  # the third, for which the first wave has waited

    asyncio.run(run())
    assert engine.calls == [2]
