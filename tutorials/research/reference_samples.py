"""``ReferenceSamples`` and ``ReferenceMixture``: some samples of each group come from another model than the policy.

Their tokens have the version :data:`~rlhfkit.data.types.OTHER_MODEL` and no log-probs (NaN), as the policy's are not
known. No correction weighs them: they are for modules that compare answers, as a policy loss would take them for the
policy's own. Their seeds are those of a seed of their own: with the policy's, equal models would give equal answers.
"""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhfkit import LocalEngine, Prompt, Sample
from rlhfkit.rollout import GroupFunction, GroupSampler, RolloutEngine


class OtherSamples(GroupFunction):
    """Base of group functions that leave the last ``count`` samples of each group to another sampler.

    Raises ``ValueError`` if ``count`` is below 1.
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        self.count = count

    async def other_engine(self, sampler: GroupSampler) -> RolloutEngine:
        """Return what samples the others. Abstract."""
        raise NotImplementedError(f"{type(self).__name__} must define other_engine()")

    async def __call__(self, prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        """Return the policy's samples and then the others'; both engines are asked at the same time.

        Raises:
            ValueError: If nothing of a group would be left for the policy.
        """
        own = size - self.count
        if own < 1:
            raise ValueError(
                f"{type(self).__name__}(count={self.count}) leaves no sample of a group to the policy, with "
                f"SamplingSpec(group_size={size}): raise group_size"
            )
        other = await self.other_engine(sampler)
        made, others = await asyncio.gather(
            sampler.sample(prompt, own), sampler.sample(prompt, self.count, engine=other)
        )
        return [*made, *others]


class ReferenceSamples(OtherSamples):
    """Some samples of each group come from a second engine, which holds the reference and is never sent weights.

    For losses that compare an answer of each (``tutorials/research/xpo.py``). Samples do not depend on the number of
    engines.

    Example::

        RolloutCallback(
            reward=PairwiseReward(judge),
            engine=VLLMPool(num_engines=2),
            group=ReferenceSamples(VLLMPool(num_engines=1)),
            sampling=SamplingSpec(group_size=2),
        )

    Args:
        reference_engine: An engine for the reference, on devices of its own, or colocated with ``sleep_level=1``.
        reference_model: Folder or hub name of the reference; ``None``: the model that training begins with. Give it
            where the module has a ``ref_model``.
        count: Samples of each group that are the reference's.

    Raises:
        TypeError: If ``reference_engine`` is not a ``RolloutEngine``.
        ValueError: If the reference would lose its weights when it sleeps.
    """

    def __init__(self, reference_engine: RolloutEngine, *, reference_model: str | None = None, count: int = 1) -> None:
        super().__init__(count)
        if not isinstance(reference_engine, RolloutEngine):
            raise TypeError(
                f"reference_engine must implement rlhfkit.rollout.RolloutEngine, got {type(reference_engine).__name__}"
            )
        if reference_engine.colocate and getattr(reference_engine, "sleep_level", 1) > 1:
            raise ValueError(
                "reference_engine drops its weights when it sleeps (sleep_level=2), and nobody sends it others: give "
                "it sleep_level=1"
            )
        self.reference_engine = reference_engine
        self.reference_model = reference_model

    @property
    def engines(self) -> Sequence[RolloutEngine]:
        """The reference's."""
        return (self.reference_engine,)

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ValueError if the reference has the policy's engine, or only one of both is shared by the ranks."""
        if self.reference_engine is engine:
            raise ValueError("reference_engine is the policy's engine, which holds one model: make a second one")
        if self.reference_engine.shared != engine.shared:
            raise ValueError(
                f"{type(engine).__name__} and {type(self.reference_engine).__name__} differ in whether all ranks share "
                "them: take two engines of one kind"
            )

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Give the reference's engine the run's tokenizer."""
        self.reference_engine.configure_tokenizer(tokenizer, chat_template_kwargs)

    def start(self, engine: RolloutEngine, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
        """Start the reference's engine with the weights of its model."""
        name = self.reference_model or model
        self.reference_engine.start(name, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=True)

    async def other_engine(self, sampler: GroupSampler) -> RolloutEngine:
        """Return the reference's engine."""
        return self.reference_engine

    def close(self) -> None:
        """Free the reference's engine; a second call does nothing."""
        self.reference_engine.close()


class ReferenceMixture(OtherSamples):
    """Some samples of each group are a geometric mixture's of policy and reference, token by token.

    ``log π_m(t) = (1 - m) log π(t) + m log π_ref(t) + c`` for each next token t, where c makes the probabilities sum to
    1: the "one-step-at-a-time" regularized policy of Nash-MD (Munos et al., 2023, arXiv:2312.00886, section 7.1), for
    ``tutorials/research/nash_md.py``. m = 0 is the policy itself (self-play), 1 the reference. The engine is a
    ``LocalEngine``: vLLM computes one model at a time.

    Example::

        RolloutCallback(
            reward=PairwiseReward(judge),
            engine=LocalEngine(max_sequences=256),
            group=ReferenceMixture(mixture_coef=0.25),
            sampling=SamplingSpec(group_size=2),
        )

    Args:
        mixture_coef: m in [0, 1]; 0.5 as in TRL.
        reference_model: Folder or hub name of the reference; ``None``: the model that training begins with. Give it
            where the module has a ``ref_model``.
        count: Samples of each group that are the mixture's.

    Raises:
        TypeError: If the run's engine is another one.
        ValueError: If a number is out of range.
    """

    def __init__(self, *, mixture_coef: float = 0.5, reference_model: str | None = None, count: int = 1) -> None:
        super().__init__(count)
        if not 0 <= mixture_coef <= 1:
            raise ValueError(f"mixture_coef must be from 0 to 1, which is the reference, got {mixture_coef}")
        self.mixture_coef = mixture_coef
        self.reference_model = reference_model
        self._started: dict[str, Any] = {}
        self._mixing: MixingEngine | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without models, for ranks in other processes (on Ray)."""
        return {**self.__dict__, "_mixing": None, "_started": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled object."""
        self.__dict__.update(state, _lock=threading.Lock())

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise TypeError unless it is a ``LocalEngine``."""
        if not isinstance(engine, LocalEngine) and not engine.recorded:
            raise TypeError(
                f"ReferenceMixture mixes the logits of two models at every token, which {type(engine).__name__} cannot "
                "do: take a LocalEngine, or compare with the reference itself, ReferenceSamples(reference_engine)"
            )

    def start(self, engine: RolloutEngine, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> None:
        """Remember the model; the reference is loaded when it is asked first, to the device of the policy's engine."""
        self._started = {"model": model, "dtype": dtype, "trust_remote_code": trust_remote_code}

    async def other_engine(self, sampler: GroupSampler) -> RolloutEngine:
        """Return an engine that mixes the policy with the reference."""
        if self._mixing is None:
            await asyncio.to_thread(self._load_reference, sampler)
        assert self._mixing is not None
        return self._mixing

    def _load_reference(self, sampler: GroupSampler) -> None:
        engine = sampler.engine
        assert isinstance(engine, LocalEngine)
        with self._lock:
            if self._mixing is None:
                reference = LocalEngine(device=str(engine.device))
                named = {"model": self.reference_model or self._started["model"]}
                reference.start(**(self._started | named), load_weights=True)
                mixing = MixingEngine(engine, reference, self.mixture_coef)
                mixing.configure_tokenizer(sampler.tokenizer)
                mixing.start(**self._started)
                self._mixing = mixing

    def close(self) -> None:
        """Free the reference; a second call does nothing."""
        if self._mixing is not None:
            self._mixing.close()
        self._mixing = None


class MixingEngine(LocalEngine):
    """Samples from the geometric mixture of what two started engines hold, without weights of its own.

    It has to be started with the policy's model, which decides about stops.

    Args:
        first: The policy's; decides about batches.
        second: The reference's, of a model with the same tokens.
        weight: Of the second in [0, 1].
    """

    def __init__(self, first: LocalEngine, second: LocalEngine, weight: float) -> None:
        super().__init__(max_sequences=first.max_sequences, device=str(first.device))
        self._first = first
        self._second = second
        self._weight = weight
        self.cached = first.cached and second.cached

    @contextmanager
    def weights(self) -> Iterator[tuple[nn.Module, int]]:
        """A context in which the models and the policy's version do not change."""
        with self._first.weights() as (policy, version), self._second.weights() as (reference, _):
            yield MixedModel(policy, reference, self._weight), version

    def close(self) -> None:
        """Free the second; the first is the policy's engine."""
        self._second.close()


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
