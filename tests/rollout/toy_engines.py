"""Engines without a model, in real Ray actors, for tests of what surrounds engines."""

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhfkit.rollout.supervision.calls import Completion, Request
from rlhfkit.rollout.supervision.engines import ENGINE_NAMESPACE, Engine, Engines
from rlhfkit.rollout.supervision.health import HealthPolicy
from rlhfkit.rollout.supervision.table import PoolSettings, this_process

BREAKS = 99
"""An engine that scores this token fails, as one whose model its kernels cannot compute."""


class ToyEngine:
    """Answers a request of ``{"tokens": n, "seconds": s}`` with n times the prompt's first token, after s seconds.

    One with ``until`` is held until :meth:`release` has been called with that name.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.begun: set[str] = set()
        self.aborted: list[str] = []
        self.slept: list[int] = []
        self.released: set[str] = set()

    async def identify(self) -> dict[str, Any]:
        return this_process()

    async def start(self, has_weights: bool) -> dict[str, Any]:
        return {"max_model_len": 64, "vocabulary": 128, "pid": os.getpid()}

    async def health(self) -> dict[str, Any]:
        return {"seconds_since_step": 0.0, "paused": False}

    async def generate(self, key: str, requests: Sequence[Request]) -> list[Completion]:
        self.begun.add(key)
        return list(await asyncio.gather(*(self._answer(key, request) for request in requests)))

    async def _answer(self, key: str, request: Request) -> Completion:
        (first, *_), arguments = request
        n, end = arguments["tokens"], time.monotonic() + arguments["seconds"]
        while time.monotonic() < end and key not in self.aborted:
            await asyncio.sleep(min(0.05, max(end - time.monotonic(), 0.0)))
            end = 0.0 if arguments["until"] in self.released else end
        return Completion(np.full(n, first, np.int32), np.full(n, -0.5, np.float32), "length", [(3, n)])

    async def release(self, name: str) -> None:
        self.released.add(name)

    async def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        if sequences[0][0] == BREAKS:
            raise RuntimeError(f"head size 8 is not supported (object at {id(self):#x})")
        return [[-1.0 - self.number] * (len(sequence) - 1) for sequence in sequences]

    async def abort(self, keys: Sequence[str]) -> None:
        self.aborted += keys

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0.5)
        self.slept.append(level)

    async def wake(self, what: list[str] | None = None) -> None:
        pass


def actors_of(kind: type[ToyEngine]) -> Callable[[int, str], Any]:
    """What creates the actor of an engine of a kind."""

    def create(number: int, name: str) -> Any:
        import ray

        path = {"PYTHONPATH": str(Path(__file__).parent.parent)}
        options = {"num_cpus": 0, "max_concurrency": 1000, "max_restarts": -1, "namespace": ENGINE_NAMESPACE}
        return ray.remote(kind).options(**options, name=name, runtime_env={"env_vars": path}).remote(number)

    return create


def look(engine: Engine, what: Callable[[Any], Any]) -> Any:
    """What a function finds in the process of an engine."""
    import ray

    return ray.get(engine.actor.__ray_call__.remote(what))


def toy_engines(num_engines: int, num_ranks: int = 1, **policy: Any) -> Engines:
    """Toy engines that serve version 0."""
    settings = PoolSettings(
        num_engines=num_engines,
        engine_name="toy engine",
        sync_timeout=60.0,
        start_timeout=600.0,
        policy=HealthPolicy(**{"probe_timeout": 60.0} | policy),  # on a busy machine late is not dead
        has_weights=True,
    )
    return Engines.start(settings, actors_of(ToyEngine), num_ranks=num_ranks)


HELD = math.inf
"""Seconds of a request that is not answered unless it is released."""


def request(token: int = 7, *, tokens: int = 3, seconds: float = 0.0, until: str | None = None) -> Request:
    """A request that a toy engine understands."""
    return [token], {"tokens": tokens, "seconds": HELD if until else seconds, "until": until}
