"""``WeightSynchronizer``: copy the policy's weights to the engine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning as L

from rlhfkit.distributed import run_on_all_ranks, true_on_all_ranks
from rlhfkit.models.load import base_model_name, precision_dtype
from rlhfkit.rollout.engine import DrainableWeights, RolloutEngine
from rlhfkit.trainer_parts import policy_of, profiler_of

if TYPE_CHECKING:
    import torch

    from rlhfkit.rollout.weight_sync.source import ModuleWeights


class WeightSynchronizer:
    """Syncs the weights of one run to one engine; parts take part before and after each step.

    Args:
        engine: What generates.
        hooks: A hook of :class:`~rlhfkit.callbacks.rollout.part.RolloutPart`, by name, of all parts that have it.
        start_more: Starts further engines when this one starts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        hooks: Callable[[str], list[Callable[..., Any]]],
        start_more: Callable[..., None] | None = None,
    ) -> None:
        self.engine = engine
        self._hooks = hooks
        self._start_more = start_more
        self._source: ModuleWeights | None = None  # of the policy of the run
        self._why_copied: str | None = None
        self.metrics: Mapping[str, float] = {}
        """What the engine logs of the last sync, the same on every rank."""

    def sync(self, trainer: L.Trainer) -> None:
        """Load the weights of ``global_step`` into the engine unless it has them. A collective.

        The engine can generate afterwards: on shared devices it has the memory.
        """
        version = trainer.global_step
        if true_on_all_ranks(self.engine.version == version):
            self._call("before_generate", trainer)  # it may sleep during training, with its weights
            return
        with profiler_of(trainer).profile("rollout.sync_weights"):
            source = self._source or self._choose(trainer)
            weights = DrainableWeights(source, why_copied=self._why_copied)
            self.engine.configure_weights(weights)
            self._call("before_start", trainer)
            run_on_all_ranks(self._start)
            self._call("after_start", trainer)
            self.metrics = run_on_all_ranks(lambda: self._load(weights, version))[0]
        self._call("after_load", trainer)
        self._call("before_generate", trainer)
        self._call("after_sync", trainer)

    def _call(self, hook: str, trainer: L.Trainer) -> None:
        for call in self._hooks(hook):
            call(trainer)

    def _choose(self, trainer: L.Trainer) -> "ModuleWeights":
        """Decide what is sent in this run, and what the engine computes with."""
        from rlhfkit.rollout.weight_sync.source import ModuleWeights

        module, dtype = policy_of(trainer), precision_dtype(trainer.precision, compute=True)
        self._source = ModuleWeights(module.policy, dtype=dtype)
        reasons = [reason(trainer) for reason in self._hooks("why_copied")]
        self._why_copied = next((one for one in reasons if one is not None), None) or self._source.why_copied()
        self._model, self._trusted = base_model_name(module.model_name), module.trust_remote_code
        self._dtype: torch.dtype = dtype
        return self._source

    def _start(self) -> None:
        self.engine.start(self._model, dtype=self._dtype, trust_remote_code=self._trusted)
        if self._start_more is not None:
            self._start_more(self.engine, self._model, dtype=self._dtype, trust_remote_code=self._trusted)

    def _load(self, weights: DrainableWeights, version: int) -> Mapping[str, float]:
        try:
            self.engine.load(weights, version)
        finally:
            weights.drain()
        return dict(self.engine.sync_metrics())
