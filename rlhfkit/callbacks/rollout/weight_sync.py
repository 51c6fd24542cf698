"""``WeightSynchronizer``: copy the policy's weights to the engine, and prove that they arrived."""

from collections.abc import Mapping

import lightning as L
import torch
from torch import Tensor

from rlhfkit.callbacks.rollout.device_phases import DevicePhases
from rlhfkit.distributed import run_on_all_ranks, true_on_all_ranks
from rlhfkit.models.load import base_model_name, precision_dtype
from rlhfkit.protocols import GenerativeModule, policy_of, profiler_of
from rlhfkit.rollout.engine import DrainableWeights, RolloutEngine

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 0.3
_PROBE_LENGTH = 32


class WeightSynchronizer:
    """Syncs the weights to one engine and probes it afterwards, as equal parameters do not prove equal models.

    ``tolerance`` is the largest difference between the engine's and the trainer's log-probs of a fixed sequence;
    ``None``: 1e-3 in float32, 0.3 in 16-bit types; ``inf`` switches the probe off. ``overlaps``: whether the engine
    generates while the policy learns.
    """

    def __init__(
        self, engine: RolloutEngine, phases: DevicePhases, tolerance: float | None = None, *, overlaps: bool = False
    ) -> None:
        self.engine = engine
        self.overlaps = overlaps
        self.phases = phases
        self.tolerance = tolerance
        self.difference = 0.0
        """Largest difference of log-probs in the last probe."""
        self.metrics: Mapping[str, float] = {}
        """What the engine logs of the last sync, the same on every rank."""

    def sync(self, trainer: L.Trainer) -> None:
        """Load the weights of ``global_step`` into the engine unless it has them, and probe it. A collective.

        The engine can generate afterwards: on shared devices it has the memory.

        Raises RuntimeError if the engine's log-probs of a fixed sequence differ from the trainer's.
        """
        from rlhfkit.rollout.weight_sync.source import ModuleWeights

        module = policy_of(trainer)
        dtype = precision_dtype(trainer.precision, compute=True)
        version = trainer.global_step
        if true_on_all_ranks(self.engine.version == version):
            self.phases.generate(trainer)  # it may sleep during training, with its weights
            return
        with profiler_of(trainer).profile("rollout.sync_weights"):
            self.phases.start(
                trainer,
                lambda: self.engine.start(
                    base_model_name(module.model_name),
                    dtype=dtype,
                    trust_remote_code=module.trust_remote_code,
                ),
            )
            source = ModuleWeights(module.policy, dtype=dtype)
            weights = DrainableWeights(source, why_copied=self._why_copied(trainer) or source.why_copied())
            self.metrics = run_on_all_ranks(lambda: self._load(weights, version))[0]
        expected = self._expected(module, dtype)
        self.phases.generate(trainer)
        if expected is not None:
            self._probe(trainer, *expected)

    def _why_copied(self, trainer: L.Trainer) -> str | None:
        """Why an engine in this process has to copy weights, whatever they are."""
        if self.overlaps:
            return "the engine generates while they are trained (max_staleness)"
        return "they leave the device while it generates (offload_training)" if self.phases.offloads(trainer) else None

    def _load(self, weights: DrainableWeights, version: int) -> Mapping[str, float]:
        try:
            self.engine.load(weights, version)
        finally:
            weights.drain()
        return dict(self.engine.sync_metrics())

    def _expected(self, module: GenerativeModule, dtype: torch.dtype) -> tuple[Tensor, Tensor, float] | None:
        """Token ids for the probe, the trainer's log-probs of them, and the tolerance; ``None``: no probe."""
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)
        if tolerance == float("inf") or not self.engine.can_score:
            return None
        vocabulary = len(module.tokenizer)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (1, min(_PROBE_LENGTH, vocabulary)), generator=generator)
        return ids, module.token_logprobs(ids)[0], tolerance

    def _probe(self, trainer: L.Trainer, ids: Tensor, expected: Tensor, tolerance: float) -> None:
        def difference() -> float:
            if self.engine.shared and trainer.global_rank > 0:
                return 0.0
            return float((torch.tensor(self.engine.score(ids.tolist())[0]) - expected).abs().max())

        self.difference = worst = max(run_on_all_ranks(difference))
        if not worst <= tolerance:
            self.engine.version = None  # nothing may be sampled from weights that are not the policy's
            raise RuntimeError(
                f"after syncing version {trainer.global_step} the engine's log-probs differ from the trainer's by "
                f"{worst:.3g}, more than probe_tolerance={tolerance:g}: the weights did not arrive, or the two run "
                "different models (type, attention); a larger RolloutCallback(probe_tolerance=...) accepts it"
            )
