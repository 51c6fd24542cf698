"""The pool of vLLM engines that all tests share, and how tests see that engines sample."""

from typing import Any

from waiting import until

from rlhfkit.rollout.supervision.engines import Engine
from rlhfkit.rollout.supervision.health import HealthPolicy
from rlhfkit.rollout.vllm.pool import VLLMPool

SMALL: dict[str, Any] = {
    "device": "cpu",
    "kv_cache_gib": 1 / 16,
    # Blocks of 32 tokens, not 128, so that prompts of tests are long enough to be cached across weight updates.
    "engine_arguments": {"block_size": 32},
    "start_timeout": 600,
    "generate_timeout": 300,
    "sync_timeout": 180,
    # A tiny model fits into one bucket of the usual size; these make it several, which split fused layers.
    "bucket_bytes": 2**15,
}
"""Engines of a tiny model."""


class SharedPool(VLLMPool):
    """A pool that outlives the trainer of one test: closing it only forgets the weights."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # Where tests crowd a small machine, an engine that answers late is not a dead one.
        super().__init__(*arguments, **({"health": HealthPolicy(probe_timeout=60)} | options))

    def close(self) -> None:
        """Make whoever comes next publish weights first."""
        self.version = None

    def really_close(self) -> None:
        """End the engines."""
        super().close()


def until_sampling(engine: Engine) -> None:
    """Wait until an engine has made a step with requests after this call."""
    import ray

    ray.get(engine.actor.take_load.remote())  # and forgets the steps before
    until(lambda: ray.get(engine.actor.take_load.remote()).get("running"))
