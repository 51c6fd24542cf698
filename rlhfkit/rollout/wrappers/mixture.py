"""``ReferenceMixture``: some samples of each prompt come from a mixture of policy and reference, token by token.

vLLM computes one model at a time, so that two cannot be mixed there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, WeightSource
from rlhfkit.rollout.local.engine import LocalEngine
from rlhfkit.rollout.wrappers.reference_samples import OtherSamples
from rlhfkit.validation import check_number


class ReferenceMixture(OtherSamples):
    """A :class:`LocalEngine` of which some samples of each group are a geometric mixture's of policy and reference.

    ``log π_m(t) = (1 - m) log π(t) + m log π_ref(t) + c`` for each next token t, where c makes the probabilities sum to
    1: the "one-step-at-a-time" regularized policy of Nash-MD (Munos et al., 2023, arXiv:2312.00886, section 7.1), for
    ``tutorials/research/nash_md.py``. m = 0 is the policy itself (self-play), 1 the reference.

    Example::

        RolloutCallback(
            reward=PairwiseReward(judge),
            engine=ReferenceMixture(LocalEngine(max_sequences=256), mixture_coef=0.25),
            sampling=SamplingSpec(group_size=2),
        )

    Args:
        engine: Samples from the policy; ``None``: a ``LocalEngine()``. Others cannot mix two models.
        mixture_coef: m in [0, 1]; 0.5 as in TRL.
        reference_model: Folder or hub name of the reference; ``None``: the model that training begins with. Give it
            where the module has a ``ref_model``.
        count: Samples of each group that are the mixture's.

    Raises:
        TypeError: If ``engine`` is another engine.
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        *,
        mixture_coef: float = 0.5,
        reference_model: str | None = None,
        count: int = 1,
    ) -> None:
        engine = LocalEngine() if engine is None else engine
        if not isinstance(engine, LocalEngine):
            raise TypeError(
                f"ReferenceMixture mixes the logits of two models at every token, which {type(engine).__name__} cannot "
                "do: take a LocalEngine, or compare with the reference itself, ReferenceSamples(engine, "
                "reference_engine)"
            )
        super().__init__(engine, count)
        check_number("mixture_coef", mixture_coef, minimum=0, maximum=1, why="1 is the reference")
        self.mixture_coef = mixture_coef
        self.reference_model = reference_model
        self._reference: LocalEngine | None = None
        self._started: dict[str, Any] = {}

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Start the engine; see :meth:`RolloutEngine.start`. The reference follows when its device is known."""
        super().start(model, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=load_weights)
        name = self.reference_model or model
        self._started = {"model": name, "dtype": dtype, "trust_remote_code": trust_remote_code}
        if load_weights:
            self._load_reference()

    def load(self, weights: WeightSource, version: int) -> None:
        """Load the policy's weights, and the reference beside the first; see :meth:`RolloutEngine.load`."""
        super().load(weights, version)
        self._load_reference()

    def _load_reference(self) -> None:
        if self._reference is None:
            assert isinstance(self.engine, LocalEngine)
            self._reference = LocalEngine(device=str(self.engine.device))
            self._reference.start(**self._started, load_weights=True)

    def other_samples(self, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Return the mixture's completions."""
        if self._reference is None:
            raise RuntimeError("ReferenceMixture has no weights yet: RolloutCallback loads them, or call load()")
        assert isinstance(self.engine, LocalEngine)
        mixing = MixingEngine(self.engine, self._reference, self.mixture_coef)
        return mixing.generate(prompts, sampling, iteration=iteration)

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        super().close()
        if self._reference is not None:
            self._reference.close()
        self._reference = None


class MixingEngine(LocalEngine):
    """Samples from the geometric mixture of what two started engines hold, without weights of its own.

    Args:
        first: The policy's; decides about stops, batches and caches.
        second: The reference's, of a model with the same tokens.
        weight: Of the second in [0, 1].
    """

    def __init__(self, first: LocalEngine, second: LocalEngine, weight: float) -> None:
        super().__init__(max_sequences=first.max_sequences)
        self._first = first
        self._second = second
        self._weight = weight
        self.device = first.device
        self._config, self._tokenizer, self._stops = first._config, first._tokenizer, first._stops
        self._cached = first._cached and second._cached
        self._finished_masks = first._finished_masks and second._finished_masks

    @contextmanager
    def _weights(self) -> Iterator[tuple[nn.Module, int]]:
        with self._first._weights() as (policy, version), self._second._weights() as (reference, _):
            yield MixedModel(policy, reference, self._weight), version

    def _check_unchanged(self) -> None:
        self._first._check_unchanged()


class MixedModel(nn.Module):
    """Two causal language models whose logits are averaged, which is the geometric mean of what they predict.

    At any temperature: logits that are divided by it average to the mixture of both tempered distributions.
    """

    def __init__(self, first: nn.Module, second: nn.Module, weight: float) -> None:
        super().__init__()
        self._models = (first, second)  # a tuple registers no children: these belong to the engines
        self._weight = weight

    def forward(self, *, past_key_values: "JointCache | None" = None, **inputs: Any) -> "MixedOutput":
        """Run both models, each with its own cache."""
        caches: tuple[Any, Any] = (None, None) if past_key_values is None else past_key_values
        outputs = [
            model(**inputs, **({} if cache is None else {"past_key_values": cache}))
            for model, cache in zip(self._models, caches, strict=True)
        ]
        first, second = outputs
        kept = JointCache(first.past_key_values, second.past_key_values) if inputs.get("use_cache") else None
        return MixedOutput((1 - self._weight) * first.logits.float() + self._weight * second.logits.float(), kept)


class JointCache(NamedTuple):
    """The caches of two models for the same rows."""

    first: Any
    second: Any

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of both."""
        self.first.batch_select_indices(indices)
        self.second.batch_select_indices(indices)


class MixedOutput(NamedTuple):
    """What decoding reads of a model's output."""

    logits: Tensor
    """(B, T, V) float32."""
    past_key_values: JointCache | None
