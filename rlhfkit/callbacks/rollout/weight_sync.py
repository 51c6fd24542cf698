"""``WeightSynchronizer``: copy the policy's weights to the engine, and prove that they arrived."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import lightning as L
import torch
from torch import Tensor

from rlhfkit.callbacks.rollout.source import SeparateDevices
from rlhfkit.data.types import Sample
from rlhfkit.distributed import gather_objects, run_on_all_ranks, true_on_all_ranks
from rlhfkit.models.load import base_model_name, precision_dtype
from rlhfkit.protocols import GenerativeModule
from rlhfkit.rollout.engine import DrainableWeights, RolloutEngine
from rlhfkit.rollout.probe_bounds import ProbeBounds
from rlhfkit.trainer_parts import policy_of, profiler_of

log = logging.getLogger(__name__)

_PROBE_LENGTH = 32
_SAMPLED_LENGTH = 1024
"""Longest sequence with sampled tokens that is used, which bounds the memory of the forward pass."""


class _Probe(NamedTuple):
    """What the engine is asked, and what the answer should be."""

    ids: Tensor
    """(1, T) tokens."""
    start: int
    """The first token that counts; those before it were not sampled."""
    expected: Tensor
    """(T-1,) the trainer's log-probs of all tokens after the first."""
    bounds: ProbeBounds


class WeightSynchronizer:
    """Syncs the weights to one engine and probes it afterwards, as equal parameters do not prove equal models.

    The log-probs of engine and trainer are compared: in float32 of a fixed sequence of random tokens, in 16 bits of a
    sample of the last iteration where there is one, as those of improbable tokens are far less exact.

    ``tolerance``: largest difference, or in 16 bits mean difference, that is accepted; ``None``: by type
    (:class:`~rlhfkit.rollout.probe_bounds.ProbeBounds`); ``inf`` switches the probe off. ``overlaps``: whether the
    engine generates while the policy learns. ``start``: starts further engines when this one starts.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        phases: SeparateDevices,
        tolerance: float | None = None,
        *,
        overlaps: bool = False,
        start: Callable[..., None] | None = None,
    ) -> None:
        self.engine = engine
        self._start_more = start
        self.overlaps = overlaps
        self.phases = phases
        self.tolerance = tolerance
        self.difference = 0.0
        """Largest difference of log-probs in the last probe; in 16 bits the mean difference."""
        self._sampled: tuple[list[int], int] | None = None  # tokens of a sample, and how many of them are its prompt
        self.metrics: Mapping[str, float] = {}
        """What the engine logs of the last sync, the same on every rank."""

    def sync(self, trainer: L.Trainer) -> None:
        """Load the weights of ``global_step`` into the engine unless it has them, and probe it. A collective.

        The engine can generate afterwards: on shared devices it has the memory.

        Raises RuntimeError if the engine's log-probs differ too much from the trainer's.
        """
        from rlhfkit.rollout.weight_sync.source import ModuleWeights

        module = policy_of(trainer)
        dtype = precision_dtype(trainer.precision, compute=True)
        version = trainer.global_step
        if true_on_all_ranks(self.engine.version == version):
            self.phases.generate(trainer)  # it may sleep during training, with its weights
            return
        with profiler_of(trainer).profile("rollout.sync_weights"):
            source = ModuleWeights(module.policy, dtype=dtype)
            weights = DrainableWeights(source, why_copied=self._why_copied(trainer) or source.why_copied())
            self.engine.configure_weights(weights)
            self.phases.start(trainer, lambda: self._start(module, dtype))
            self.metrics = run_on_all_ranks(lambda: self._load(weights, version))[0]
        probe = self._expected(trainer, module, dtype)
        self.phases.generate(trainer)
        if probe is not None:
            self._probe(trainer, probe)

    def _start(self, module: GenerativeModule, dtype: torch.dtype) -> None:
        model, trusted = base_model_name(module.model_name), module.trust_remote_code
        self.engine.start(model, dtype=dtype, trust_remote_code=trusted)
        if self._start_more is not None:
            self._start_more(self.engine, model, dtype=dtype, trust_remote_code=trusted)

    def remember(self, samples: Sequence[Sample]) -> None:
        """Take one of the samples of this rank for later probes."""
        for sample in samples:
            prompt = sample.prompt.num_tokens
            if sample.num_tokens >= _PROBE_LENGTH and prompt + sample.num_tokens <= _SAMPLED_LENGTH:
                self._sampled = (sample.all_token_ids.tolist(), prompt)
                return

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

    def _expected(self, trainer: L.Trainer, module: GenerativeModule, dtype: torch.dtype) -> _Probe | None:
        """Return the probe with the trainer's log-probs; ``None``: there is no probe. A collective."""
        if self.tolerance == float("inf") or not self.engine.can_score:
            return None
        on_gpu = trainer.strategy.root_device.type == "cuda"
        tf32 = on_gpu and torch.get_float32_matmul_precision() != "highest"
        bounds = ProbeBounds.of(dtype, self.tolerance, tf32=tf32, quantized=self.engine.quantized)
        tokens, start = self._random_tokens(len(module.tokenizer)), 1
        if bounds.statistic == "mean":  # all ranks take the same, as they may compute one forward pass together
            tokens, start = next((one for one in gather_objects(self._sampled) if one is not None), (tokens, start))
        ids = torch.tensor([tokens])
        return _Probe(ids, max(start, 1), module.token_logprobs(ids)[0], bounds)

    def _random_tokens(self, vocabulary: int) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        tokens: list[int] = torch.randint(vocabulary, (min(_PROBE_LENGTH, vocabulary),), generator=generator).tolist()
        return tokens

    def _probe(self, trainer: L.Trainer, probe: _Probe) -> None:
        def difference() -> float:
            if self.engine.shared and trainer.global_rank > 0:
                return 0.0
            scores = torch.tensor(self.engine.score(probe.ids.tolist())[0])
            return probe.bounds.measure((scores - probe.expected)[probe.start - 1 :])

        bounds = probe.bounds
        # max() of Python passes over NaN, which must fail.
        self.difference = worst = float(torch.tensor(run_on_all_ranks(difference), dtype=torch.float64).max())
        kind = "" if bounds.statistic == "max" else f" on average over {len(probe.expected) - probe.start + 1} tokens"
        found = (
            f"after syncing version {trainer.global_step} the engine's log-probs differ from the trainer's by "
            f"{worst:.3g}{kind}"
        )
        if not worst <= bounds.fail:
            self.engine.version = None  # nothing may be sampled from weights that are not the policy's
            raise RuntimeError(
                f"{found}, more than probe_tolerance={bounds.fail:g}: the weights did not arrive, or the two run "
                "different models (type, attention); a larger RolloutCallback(probe_tolerance=...) accepts it"
            )
        if worst > bounds.warn:
            log.warning(
                "%s; up to %g is usual in this type. Tokens are trained on with the engine's log-probs: look at the "
                "mismatch metrics, and consider a correction (GRPOModule(correction=...))", found, bounds.warn
            )  # fmt: skip
