"""Engines that sleep as vLLM's do on a GPU, without one: stand-ins that refuse to work without the memory they need.

Pool, manager, coordinator, sender, callback and Trainer are real; the engine is a Ray actor whose answers depend on the
bytes it was sent, and whose memory is a set of tags, as in vLLM. Everybody writes down what happens, and when.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray_worker
import torch
from callbacks.rollout.offload_runs import Look, OwnGRPO
from rl_runs import additions, fit_run

from rlhfkit import RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks import SharedDevices
from rlhfkit.data.types import Prompt
from rlhfkit.rollout.engine import sample_seed
from rlhfkit.rollout.supervision.calls import Completion, Request
from rlhfkit.rollout.supervision.engines import Engines
from rlhfkit.rollout.supervision.health import HealthPolicy
from rlhfkit.rollout.vllm.placement import RankLocation
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync import cuda_ipc
from rlhfkit.training_states import TrainingStates
from rollout.toy_engines import ToyEngine, actors_of, look
from rollout.weight_sync.mapped_ipc import MappedSender, open_mapped

SPEC = SamplingSpec(group_size=4, max_new_tokens=6)
Events = list[tuple[float, str]]
"""What happened, with seconds on the clock that all processes of a machine share."""

EVERYTHING = frozenset({"weights", "kv_cache"})


class SleepingEngine(ToyEngine):
    """What vLLM 0.32's worker, executor and scheduler do with memory, as an engine's states."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.memory = set(EVERYTHING)
        self.paused = False
        self.weights: str | None = None
        self.arriving: Any = None
        self.version = -1
        self.log: Events = []

    def note(self, what: str) -> None:
        self.log.append((time.monotonic(), f"engine: {what}"))

    async def generate(self, key: str, requests: Sequence[Request]) -> list[Completion]:
        if self.paused or self.memory != EVERYTHING or self.weights is None:
            raise RuntimeError(f"asked to generate with {sorted(self.memory)}, weights {self.weights}")
        if not self.log or self.log[-1][1] != "engine: generate":
            self.note("generate")
        return [self._sample(arguments) for _, arguments in requests]

    def _sample(self, arguments: dict[str, Any]) -> Completion:
        """Tokens that depend on the weights and the seed."""
        n = arguments["tokens"]
        bits = hashlib.sha256(f"{self.weights} {arguments['seed']}".encode()).digest()
        tokens = np.array([3 + bits[index] % 60 for index in range(n)], np.int32)
        return Completion(tokens, np.full(n, -0.5, np.float32), "length", [(self.version, n)])

    async def connect(self, init_info: dict[str, Any]) -> None:
        assert init_info == {"packed": True}

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False

    async def begin_update(self) -> None:
        assert self.paused
        assert "weights" in self.memory
        self.arriving, self.weights = hashlib.sha256(), None

    async def update(self, info: dict[str, Any]) -> None:
        import base64
        import pickle

        self.note("read")
        (handle,) = pickle.loads(base64.b64decode(info["ipc_handles_pickled"])).values()
        self.arriving.update(bytes(open_mapped(*handle)[: sum(info["tensor_sizes"])].numpy()))

    async def finish_update(self, version: int) -> None:
        self.note("close the ranks' buffers")
        self.weights, self.version, self.arriving = self.arriving.hexdigest(), version, None

    async def abandon_update(self) -> None:
        self.arriving = None

    async def sleep(self, level: int) -> None:
        self.note(f"sleep({level})")
        self.paused, self.memory = True, set()
        self.weights = self.weights if level == 1 else None

    async def wake(self, what: list[str] | None = None) -> None:
        self.note("wake(weights)" if what else "wake(all)")
        self.memory |= set(what or EVERYTHING)
        self.paused = self.memory != EVERYTHING


class SleepingPool(VLLMPool):
    """One engine on the first rank's device. It outlives a run: closing it only forgets the weights."""

    can_score = False  # a stand-in has no log-probs

    def __init__(self, folder: Path) -> None:
        super().__init__(
            colocate=True,
            device="cpu",
            generate_timeout=60.0,
            sync_timeout=60.0,
            bucket_bytes=2**16,
            health=HealthPolicy(probe_period=0.2, probe_timeout=30.0, recovery_timeout=0.5, max_restarts=20),
        )
        self.folder = folder

    def start_engines(
        self, model: str, dtype: torch.dtype, trust_remote_code: bool, load_weights: bool, ranks: list[RankLocation]
    ) -> None:
        self.connect_to_ray(ranks)
        self.sender = MappedSender(self.folder / "buffer", bucket_bytes=self.bucket_bytes)
        self.engines = Engines.start(self.settings(False), actors_of(SleepingEngine), num_ranks=len(ranks))

    def check_model(self, model: str, *, trust_remote_code: bool = False) -> None:
        """A stand-in runs any."""

    def prepare_requests(self, model: str, trust_remote_code: bool) -> None:
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            self.sender = MappedSender(self.folder / "other", bucket_bytes=self.bucket_bytes)

    def make_request(
        self, prompt: Prompt, index: int, *, sampling: SamplingSpec, iteration: int, begun: Any = None
    ) -> Request:
        seed = sample_seed(sampling.seed, iteration, prompt.index, index)
        return prompt.token_ids.tolist(), {"tokens": sampling.max_new_tokens, "seed": seed}

    def close(self) -> None:
        self.version = None

    def really_close(self) -> None:
        super().close()


class Recorder:
    """Writes down what this rank does with memory; stands in for ``torch.cuda`` and ``gc`` in ``cuda_ipc.py``."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: Events = []
        cuda = SimpleNamespace(
            is_available=lambda: True, empty_cache=self.noting("empty_cache"), ipc_collect=self.noting("ipc_collect")
        )
        patch.setattr(cuda_ipc, "torch", SimpleNamespace(cuda=cuda, uint8=torch.uint8))
        patch.setattr(cuda_ipc, "gc", SimpleNamespace(collect=self.noting("gc.collect")))
        offload, reload = TrainingStates.offload_states, TrainingStates.reload_states
        recorder = self

        def leave(states: TrainingStates, *, weights: bool = True, keep: Any = ()) -> None:
            recorder.note("all states leave" if weights else "optimizer states leave")
            offload(states, weights=weights, keep=keep)

        def come_back(states: TrainingStates, **arguments: Any) -> None:
            reload(states, **arguments)
            recorder.note("states are back")

        patch.setattr(TrainingStates, "offload_states", leave)
        patch.setattr(TrainingStates, "reload_states", come_back)

    def note(self, what: str) -> None:
        self.log.append((time.monotonic(), f"rank: {what}"))

    def noting(self, what: str) -> Callable[[], None]:
        return lambda: self.note(what)


def merged(*logs: Events) -> list[str]:
    """What happened, in order; what is repeated without anything between is named once."""
    names = [what for _, what in sorted(event for log in logs for event in log)]
    return [one for place, one in enumerate(names) if place == 0 or names[place - 1] != one]


def parity(samples: Sequence[Sample]) -> list[float]:
    """A reward that a stand-in's tokens can get."""
    return [float(sum(sample.token_ids.tolist()) % 3) for sample in samples]


def run(folder: Path, pool: VLLMPool, *, reward: Any = parity, **arguments: Any) -> dict[str, Any]:
    """Two iterations of two updates, with a validation before them and after each; what was learned."""
    rollouts = RolloutCallback(reward, engine=pool, sampling=SPEC, parts=arguments.pop("parts", ()))
    seen = Look(rollouts)
    torch.manual_seed(0)
    ranks = arguments.get("devices", 1)
    data = {"rollout_batch_size": 8, "micro_batch_size": 8 // ranks, "validation_data": additions(4)}
    arguments["callbacks"] = [*arguments.get("callbacks", ()), seen]
    trainer, *_ = fit_run(
        folder, module=OwnGRPO, rollouts=rollouts, data_arguments=data, use_distributed_sampler=False, **arguments
    )
    return {"tokens": seen.tokens, "digest": seen.digest, "metrics": dict(trainer.callback_metrics)}


def events(pool: VLLMPool) -> Events:
    """What the engine has written down, which it forgets; only on rank 0."""
    assert pool.engines is not None

    def take(engine: Any) -> Events:
        taken, engine.log = engine.log, []
        return list(taken)

    found: Events = look(pool.engines.handles[0], take)
    return found


SYNC = [
    "rank: optimizer states leave",
    "rank: gc.collect",
    "rank: empty_cache",
    "engine: wake(weights)",
    "engine: read",
    "engine: close the ranks' buffers",
    "rank: gc.collect",
    "rank: ipc_collect",
]
GENERATE = ["rank: all states leave", "rank: gc.collect", "rank: empty_cache", "engine: wake(all)", "engine: generate"]


def phases_of_a_run(level: int) -> list[str]:
    """What ranks and engine do in :func:`run` from the first sync on.

    A validation, and two iterations with a validation after each; level 1 keeps the weights of a validation.
    """
    learn = [f"engine: sleep({level})", "rank: states are back"]
    synced, again = [*SYNC, *GENERATE, *learn], [*([] if level == 1 else SYNC), *GENERATE, *learn]
    return [*synced, *again, *synced, *again, *synced]


def on_ranks(folder: Path) -> dict[str, Any]:
    """Entry point of a rank: a run on two ranks, of which the first has the engine on its device."""
    rank = int(os.environ["LOCAL_RANK"])
    ray_worker.use()
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        pool = SleepingPool(folder)
        found = run(folder / f"rank{rank}", pool, parts=[SharedDevices(True)], strategy="ddp", devices=2)
        assert isinstance(pool.sender, MappedSender)
        result = {
            "digest": found["digest"],
            "log": recorder.log,
            "engine": events(pool) if rank == 0 else [],
            "exported": len(pool.sender.exported),
        }
        pool.really_close()
    return result
