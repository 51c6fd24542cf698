"""A pool of two real engines, in one chain of accidents: each test takes it as the one before has left it.

Covers ``weight_sync/coordinator.py`` too.

An engine needs half a minute to start on a busy machine of two cores, so the accidents share them.
"""

import contextlib
import copy
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_pool import until_sampling
from tiny_models import completion_logprobs, tiny_model
from torch import nn
from waiting import has_ended, until

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.supervision.engines import Engine
from rlhfkit.rollout.supervision.health import HealthPolicy, State
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rollout.vllm.test_pool import EXACT, keyed, load_trainer_model, train_a_little

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [Prompt(index=index, token_ids=[10 + index] * (40 + index)) for index in range(12)]
SPEC = SamplingSpec(group_size=8, max_new_tokens=200, min_new_tokens=180)
ENDLESS = [Prompt(index=index, token_ids=[10 + index] * 40) for index in range(24)]
"""With LONG, work for engines that nobody waits for: many times as much as they do in any second."""
LONG = SamplingSpec(group_size=8, max_new_tokens=440, min_new_tokens=440)


class Scene:
    """The pool under test and the weights that it was sent, by version."""

    def __init__(self, pool: VLLMPool, folder: Path) -> None:
        self.pool = pool
        self.model = load_trainer_model(folder)
        self.models: dict[int, nn.Module] = {}

    def load(self, version: int, source: Callable[[nn.Module], ModuleWeights] = ModuleWeights) -> None:
        """Change the weights and send them."""
        train_a_little(self.model, seed=version)
        self.models[version] = copy.deepcopy(self.model)
        self.pool.load(source(self.model), version)

    def handle(self, number: int) -> Engine:
        """The process that is this engine now."""
        assert self.pool.engines is not None
        self.pool.engines.update(at_once=True)
        return self.pool.engines.handles[number]

    def send(self, number: int, what: signal.Signals) -> int:
        """Send an engine's process a signal; returns its pid."""
        pid = self.handle(number).info["pid"]
        with contextlib.suppress(ProcessLookupError):  # the accident before was its last
            os.kill(pid, what)
        return pid

    def until_stale(self, number: int) -> None:
        """Wait until an engine is up again."""
        assert self.pool.engines is not None
        until(lambda: self.handle(number).state is State.STALE, limit=600, report=self.pool.engines.report)

    def strike(self, number: int, what: signal.Signals, iteration: int) -> list[Sample]:
        """Samples that were being made when a signal hit one of the engines that had a part of them."""
        with ThreadPoolExecutor(1) as threads:
            while True:  # until they were not made before
                future = threads.submit(self.pool.generate, PROMPTS, SPEC, iteration=iteration)
                until(lambda: self.handle(number).num_requests >= 10 or future.done())  # noqa: B023
                self.send(number, signal.SIGSTOP)  # what it has not answered now, it does not
                time.sleep(0.3)  # in which its answers arrive
                if self.handle(number).num_requests:
                    break
                self.send(number, signal.SIGCONT)
                future.result(timeout=120)
            self.send(number, what)
            return future.result(timeout=120)

    def check(self, samples: list[Sample], spec: SamplingSpec = SPEC) -> None:
        """Every token's log-prob is that of the version it says it is of."""
        for sample in samples:
            found, versions = torch.tensor(sample.logprobs), torch.tensor(sample.versions)
            for version in versions.unique().tolist():
                own = versions == version
                difference = completion_logprobs(self.models[version], sample) - found
                assert float(difference[own].abs().max()) <= EXACT


@pytest.fixture(scope="module")
def manager(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two engines of an untied model that were sent version 1."""
    folder = tiny_model(tmp_path_factory.mktemp("untied"), tied=False)
    pool = VLLMPool(
        num_engines=2,
        device="cpu",
        colocate=True,  # placed beside this process; nothing else differs on a CPU
        kv_cache_gib=1 / 16,
        engine_arguments={"block_size": 32},
        start_timeout=600,
        generate_timeout=300,
        sync_timeout=60,
        bucket_bytes=2**15,
        health=HealthPolicy(probe_period=1, probe_timeout=5, probe_failures=3, recovery_timeout=300, max_restarts=20),
    )
    with pytest.raises(RuntimeError, match=r"before VLLMPool\.start"):
        pool.load(ModuleWeights(load_trainer_model(folder)), 0)
    assert pool.configure_logprobs(SPEC)
    pool.start(str(folder), dtype=torch.float32)
    try:
        made = Scene(pool, folder)
        made.load(1)
        yield made
    finally:
        pool.close()


def same(samples: list[Sample], others: list[Sample]) -> bool:
    """Whether two runs have made the same tokens of the same samples in the same order."""
    return [(one.prompt.index, one.sample_index, one.token_ids.tolist()) for one in samples] == [
        (one.prompt.index, one.sample_index, one.token_ids.tolist()) for one in others
    ]


@pytest.mark.smoke
def test_a_killed_engines_requests_are_finished_by_the_other_and_come_out_the_same(manager: Scene) -> None:
    undisturbed = manager.pool.generate(PROMPTS, SPEC, iteration=1)
    manager.check(undisturbed)
    disturbed = manager.strike(0, signal.SIGKILL, iteration=1)
    assert same(disturbed, undisturbed)
    assert manager.handle(0).restarts == 1


@pytest.mark.smoke
def test_the_engine_started_again_serves_only_after_the_next_load(manager: Scene) -> None:
    manager.until_stale(0)
    before = manager.pool.generate(PROMPTS[:4], SPEC, iteration=2)
    assert manager.handle(0).num_requests == 0
    assert not manager.handle(0).takes_requests
    manager.check(before)  # a stale engine's weights are random: its log-probs would show
    manager.load(2)
    assert manager.handle(0).state is State.SERVING
    assert manager.handle(0).version == manager.pool.version == 2
    after = manager.pool.generate(PROMPTS, SPEC, iteration=2)
    manager.check(after)
    assert {version for sample in after for version in sample.versions.tolist()} == {2}
    first, second = manager.pool.scores([list(range(10, 60))]).values()
    assert first[0] == pytest.approx(second[0], abs=1e-3)


def test_a_stopped_engine_is_found_out_killed_and_its_requests_rerun(manager: Scene) -> None:
    undisturbed = manager.pool.generate(PROMPTS, SPEC, iteration=3)
    stopped = manager.handle(1).info["pid"]
    assert same(manager.strike(1, signal.SIGSTOP, iteration=3), undisturbed)
    until(lambda: has_ended(stopped))


def test_an_engine_killed_during_a_load_leaves_no_half_updated_one(manager: Scene) -> None:
    manager.until_stale(1)
    manager.load(3)
    seen: list[State] = []

    class KillsOne(ModuleWeights):
        def __iter__(self) -> Any:
            for number, (name, tensor) in enumerate(super().__iter__()):
                if number == 5 and not seen:
                    seen.extend(manager.handle(engine).state for engine in (0, 1))
                    manager.send(0, signal.SIGKILL)
                yield name, tensor

    stream = manager.pool.stream(LONG, iteration=4)  # requests that are under way live through it
    stream.submit(ENDLESS)
    until_sampling(manager.handle(1))
    manager.load(4, KillsOne)
    until_sampling(manager.handle(1))
    kept = [sample for group in stream.cut() for sample in group]
    assert seen == [State.SYNCING, State.SYNCING]  # nobody served while it happened
    assert manager.pool.version == 4
    assert [manager.handle(engine).version for engine in (0, 1)] == [None, 4]
    manager.check(kept[::8])
    versions = {version for sample in kept for version in sample.versions.tolist()}
    assert versions == {3, 4}
    assert all(sample.versions.tolist() == sorted(sample.versions.tolist()) for sample in kept)
    manager.check(manager.pool.generate(PROMPTS, SPEC, iteration=5))


def test_two_thousand_samples_through_accidents_are_all_there_once(manager: Scene) -> None:
    """Several callers at once, loads in between, and engines that are killed or stopped."""
    chance, spec = random.Random(7), SamplingSpec(group_size=5, max_new_tokens=12)
    enough = threading.Event()

    def ask(caller: int) -> list[Sample]:
        made: list[Sample] = []
        turns = itertools.takewhile(lambda turn: turn < 10 or not enough.is_set(), itertools.count())
        for turn in turns:
            rows = [Prompt(index=caller * 10**5 + turn * 10 + row, token_ids=[10 + row] * 20) for row in range(10)]
            made += manager.pool.generate(rows, spec, iteration=turn)
            time.sleep(1.5)  # an episode's tools
        return made

    with ThreadPoolExecutor(4) as threads:
        callers: list[Future[list[Sample]]] = [threads.submit(ask, caller) for caller in range(4)]
        try:
            assert manager.pool.engines is not None
            for version, accident in ((5, signal.SIGKILL), (7, signal.SIGSTOP)):
                manager.pool.engines.wait_until_up(wait_for_all=True)
                manager.load(version)
                time.sleep(chance.uniform(1, 2))
                manager.send(chance.choice((0, 1)), accident)
                time.sleep(chance.uniform(0, 3))  # the next load is what finds it out, or not
                manager.load(version + 1)
        finally:
            enough.set()
        samples = [sample for caller in callers for sample in caller.result()]
    assert len(keyed(samples)) == len(samples) >= 2000
    assert len(samples) % 50 == 0  # of each turn
    manager.check(samples[::20], spec)
    assert all(sample.versions.tolist() == sorted(sample.versions.tolist()) for sample in samples)
