"""``Probe``: after each sync the log-probs of engine and trainer are compared, to prove that the weights arrived.

Where its bounds come from. In float32 only the order of summation differs: vLLM and Transformers differed by 5e-6 at
most on CPUs (models up to 0.5B parameters), so 1e-3 is generous, and any token above it is a fault.

In 16 bits the largest difference says little: bfloat16 has 8 bits, so a logit between 16 and 32 has steps of 0.125, and
a rare token may be off by several. Hence the mean over tokens that were sampled. vLLM's from Transformers' was, in
bfloat16 on a CPU, 0.001 at 0.3M parameters, 0.004 at 58M, 0.011 at 204M and 0.019 at 0.5B; larger models and the
kernels of GPUs have not been measured. float16 has 3 bits more, and TF32, which GPUs may compute float32 in, as many.
FP8 rounds weights and activations to 3 bits: means of 0.04 to 0.15 in models of two layers on a CPU.
Weights of another model differ by several nats, a single layer that kept old weights by 0.1 and more.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from torch import Tensor

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.data.types import Sample
from rlhfkit.distributed import gather_objects, run_on_all_ranks
from rlhfkit.models.load import precision_dtype
from rlhfkit.protocols import SeesImages
from rlhfkit.trainer_parts import policy_of
from rlhfkit.validation import check_number

log = logging.getLogger(__name__)

_PROBE_LENGTH = 32
_SAMPLED_LENGTH = 1024
"""Longest sequence with sampled tokens that is used, which bounds the memory of the forward pass."""


class ProbeBounds(NamedTuple):
    """Bounds on the differences of log-probs."""

    statistic: Literal["max", "mean"]
    """Of the absolute differences."""
    warn: float
    """Above it a warning is logged: unusual."""
    fail: float
    """Above it the weights, or the models, are not the same."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, tolerance: float | None = None, *, tf32: bool = False, quantized: bool = False
    ) -> "ProbeBounds":
        """Return the bounds for a type.

        Args:
            dtype: Type in which the models compute.
            tolerance: Replaces ``fail``; there is no warning then. ``None``: the module's docstring explains them.
            tf32: Whether float32 is computed as TF32.
            quantized: Whether one of the two computes in 8 bits.
        """
        bounds = _BOUNDS.get(torch.float16 if tf32 and dtype == torch.float32 else dtype, _BOUNDS[torch.bfloat16])
        bounds = _QUANTIZED if quantized else bounds
        return bounds if tolerance is None else cls(bounds.statistic, tolerance, tolerance)

    def measure(self, differences: Tensor) -> float:
        """Return the statistic of (T,) differences, NaN if one is; 0 if there are none."""
        sizes = differences.double().abs()
        if not len(sizes):
            return 0.0
        return float(sizes.max() if self.statistic == "max" else sizes.mean())


_BOUNDS = {
    torch.float64: ProbeBounds("max", 1e-6, 1e-6),
    torch.float32: ProbeBounds("max", 1e-3, 1e-3),
    torch.float16: ProbeBounds("mean", 0.02, 0.1),
    torch.bfloat16: ProbeBounds("mean", 0.1, 0.3),
}
_QUANTIZED = ProbeBounds("mean", 0.3, 1.0)


class _Question(NamedTuple):
    """What the engine is asked, and what the answer should be."""

    ids: Tensor
    """(1, T) tokens."""
    start: int
    """The first token that counts; those before it were not sampled."""
    expected: Tensor
    """(T-1,) the trainer's log-probs of all tokens after the first."""
    bounds: ProbeBounds
    images: tuple[Sequence[tuple[Any, ...]], ...]
    """What both are given beside the tokens: the images of the one sequence, or nothing if it has none."""


class Probe(RolloutPart):
    """Compares log-probs of every engine after each sync, as equal parameters do not prove equal models.

    In float32 those of a fixed sequence of random tokens, with a picture if model and engine see them, in 16 bits those
    of a sample of the last iteration where there is one, as improbable tokens are far less exact. A ``RolloutCallback``
    has a probe by default.

    Args:
        tolerance: Largest difference that is accepted; in 16-bit types (and TF32) of the mean difference. ``None``:
            1e-3 in float32, 0.3 in bfloat16 (a warning from 0.1 on), 0.1 in float16 (0.02), 1 for quantized engines
            (0.3), see :class:`ProbeBounds`; ``inf`` switches the probe off.

    Raises:
        ValueError: If ``tolerance`` is not above 0.
    """

    def __init__(self, tolerance: float | None = None) -> None:
        check_number("tolerance", tolerance, above=0, optional=True, infinite=True, why="inf is no probe")
        self.tolerance = tolerance
        self.difference = 0.0
        """Largest difference of log-probs in the last probe, of all engines; in 16 bits the mean difference."""
        # Tokens of a sample, how many of them are its prompt, and its images.
        self._sampled: tuple[list[int], int, tuple[Any, ...]] | None = None
        self._question: _Question | None = None

    def metrics(self, shared: SharedIteration, version: int) -> Mapping[str, float]:
        self._remember(shared.samples)
        return {"rollout/probe_difference": self.difference}

    def _remember(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            prompt = sample.prompt.num_tokens
            fits = sample.num_tokens >= _PROBE_LENGTH and prompt + sample.num_tokens <= _SAMPLED_LENGTH
            if fits:
                self._sampled = (sample.all_token_ids.tolist(), prompt, sample.prompt.attachments)
                return

    def after_load(self, trainer: L.Trainer) -> None:
        self._question = None
        engine, module = self.rollouts.engine, policy_of(trainer)
        if self.tolerance == float("inf") or not engine.can_score:
            return
        tf32 = trainer.strategy.root_device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        dtype = precision_dtype(trainer.precision, compute=True)
        bounds = ProbeBounds.of(dtype, self.tolerance, tf32=tf32, quantized=engine.quantized)
        question: tuple[list[int], int, tuple[Any, ...]] = (_random_tokens(len(module.tokenizer)), 1, ())
        processor = module.image_processor if isinstance(module, SeesImages) else None
        if processor is not None:
            model = None if engine.image_processor is None else module.policy
            tokens, images = processor.probe(question[0], module.tokenizer, model)
            question = (tokens, 1, images)
        if bounds.statistic == "mean":  # all ranks take the same, as they may compute one forward pass together
            question = next((one for one in gather_objects(self._sampled) if one is not None), question)
        tokens, start, images = question
        ids, seen = torch.tensor([tokens]), ([images],) if images else ()
        self._question = _Question(ids, max(start, 1), module.token_logprobs(ids, *seen)[0], bounds, seen)

    def after_sync(self, trainer: L.Trainer) -> None:
        """Compare the engine's log-probs; raises RuntimeError if they differ too much."""
        asked, engine = self._question, self.rollouts.engine
        if asked is None:
            return

        def differences() -> dict[str, float]:
            if engine.shared and trainer.global_rank > 0:
                return {}
            scores = engine.scores(asked.ids.tolist(), *asked.images)
            found = {name: torch.tensor(rows[0]) for name, rows in scores.items()}
            first = asked.start - 1
            return {name: asked.bounds.measure((each - asked.expected)[first:]) for name, each in found.items()}

        bounds = asked.bounds
        of_all = [each for of_rank in run_on_all_ranks(differences) for each in of_rank.items()]
        name, worst = max(of_all, key=lambda each: math.inf if math.isnan(each[1]) else each[1])  # NaN must fail
        self.difference = worst
        kind = "" if bounds.statistic == "max" else f" on average over {len(asked.expected) - asked.start + 1} tokens"
        found = (
            f"after syncing version {trainer.global_step} {name}'s log-probs differ from the trainer's by "
            f"{worst:.3g}{kind}"
        )
        if not worst <= bounds.fail:
            engine.version = None  # nothing may be sampled from weights that are not the policy's
            raise RuntimeError(
                f"{found}, more than Probe(tolerance={bounds.fail:g}): the weights did not arrive, or the two run "
                "different models (type, attention); a larger tolerance accepts it"
            )
        if worst > bounds.warn:
            log.warning(
                "%s; up to %g is usual in this type. Tokens are trained on with the engine's log-probs: look at the "
                "mismatch metrics, and consider a Correction among the module's parts", found, bounds.warn
            )  # fmt: skip


def _random_tokens(vocabulary: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocabulary, (min(_PROBE_LENGTH, vocabulary),), generator=generator).tolist()
    return tokens
