"""``ReferenceSamples``: some samples of each prompt come from a model that does not learn.

:class:`OtherSamples` is the base of engines of which a part of every group is another sampler's.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlhfkit.data.types import OTHER_MODEL, Prompt, Sample
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec, sample_seed
from rlhfkit.rollout.wrappers.engine_wrapper import EngineWrapper
from rlhfkit.validation import check_integer


class OtherSamples(EngineWrapper):
    """An engine that leaves the last samples of each group to another sampler; a subclass has :meth:`other_samples`.

    The others' tokens have the version :data:`~rlhfkit.data.types.OTHER_MODEL` and no log-probs (NaN), as the policy's
    are not known. No correction weighs them: they are for modules that compare answers, as a policy loss would take
    them for the policy's own. Their seeds are those of a seed of their own: with the policy's, equal models would give
    equal answers. Validation and single samples are the policy's alone.

    Args:
        engine: Samples from the policy.
        count: Samples of each group that are the others'; the rest is the policy's.

    Raises:
        TypeError: If ``engine`` is not a ``RolloutEngine``.
        ValueError: If ``count`` is below 1.
    """

    def __init__(self, engine: RolloutEngine, count: int = 1) -> None:
        super().__init__(engine)
        check_integer("count", count, minimum=1)
        self.count = count

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Sample with both; see :meth:`RolloutEngine.generate`.

        Raises:
            ValueError: If nothing of a group would be left for the policy.
        """
        if sampling.group_size == 1:
            return self.engine.generate(prompts, sampling, iteration=iteration)
        own = sampling.group_size - self.count
        if own < 1:
            raise ValueError(
                f"{type(self).__name__}(count={self.count}) leaves no sample of a group to the policy, with "
                f"SamplingSpec(group_size={sampling.group_size}): raise group_size"
            )
        seed = sample_seed(sampling.seed, OTHER_MODEL, OTHER_MODEL, OTHER_MODEL)
        ours = dataclasses.replace(sampling, group_size=own)
        theirs = dataclasses.replace(sampling, group_size=self.count, seed=seed)
        made, others = self.both(prompts, ours, theirs, iteration)
        for sample in others:
            sample.sample_index += own
            sample.versions = [OTHER_MODEL] * sample.num_tokens
            sample.logprobs = [math.nan] * sample.num_tokens
        return [
            sample
            for place in range(len(prompts))
            for sample in (
                *made[place * own : (place + 1) * own],
                *others[place * self.count : (place + 1) * self.count],
            )
        ]

    def both(
        self, prompts: Sequence[Prompt], ours: SamplingSpec, theirs: SamplingSpec, iteration: int
    ) -> tuple[list[Sample], list[Sample]]:
        """Return the policy's samples and the others', one after the other."""
        made = self.engine.generate(prompts, ours, iteration=iteration)
        return made, self.other_samples(prompts, theirs, iteration)

    def other_samples(self, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Return the other sampler's completions, as :meth:`RolloutEngine.generate` does. Abstract."""
        # Abstract by hand: EngineWrapper is a Protocol with members of its own, whose subclasses can be built.
        raise NotImplementedError(f"{type(self).__name__} must define other_samples()")


class ReferenceSamples(OtherSamples):
    """Two engines as one: the policy's, and one that holds the reference and is never sent weights.

    For losses that compare an answer of each (``tutorials/research/xpo.py``). Samples do not depend on the number of
    engines.

    Example::

        RolloutCallback(
            reward=PairwiseReward(judge),
            engine=ReferenceSamples(VLLMPool(num_engines=2), VLLMPool(num_engines=1)),
            sampling=SamplingSpec(group_size=2),
        )

    Args:
        engine: Samples from the policy.
        reference_engine: An engine of the same kind for the reference, on devices of its own, or colocated with
            ``sleep_level=1``.
        reference_model: Folder or hub name of the reference; ``None``: the model that training begins with. Give it
            where the module has a ``ref_model``.
        count: Samples of each group that are the reference's.

    Raises:
        TypeError: If an engine is not a ``RolloutEngine``.
        ValueError: If both are the same object, only one of them is shared by the ranks, or the reference would lose
            its weights when it sleeps.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        reference_engine: RolloutEngine,
        *,
        reference_model: str | None = None,
        count: int = 1,
    ) -> None:
        super().__init__(engine, count)
        if not isinstance(reference_engine, RolloutEngine):
            raise TypeError(
                f"reference_engine must implement rlhfkit.rollout.RolloutEngine, got {type(reference_engine).__name__}"
            )
        if reference_engine is engine:
            raise ValueError("reference_engine is the policy's engine, which holds one model: make a second one")
        if reference_engine.shared != engine.shared:
            raise ValueError(
                f"{type(engine).__name__} and {type(reference_engine).__name__} differ in whether all ranks share "
                "them: take two engines of one kind"
            )
        if reference_engine.colocate and getattr(reference_engine, "sleep_level", 1) > 1:
            raise ValueError(
                "reference_engine drops its weights when it sleeps (sleep_level=2), and nobody sends it others: give "
                "it sleep_level=1"
            )
        self.reference_engine = reference_engine
        self.reference_model = reference_model

    @property
    def colocate(self) -> bool:
        """Whether one of them uses the GPUs of the training ranks, and has to sleep."""
        return self.engine.colocate or self.reference_engine.colocate

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens that both take; ``None``: the model's context."""
        lengths = [one.max_model_len for one in (self.engine, self.reference_engine)]
        return min((length for length in lengths if length is not None), default=None)

    def configure_tokenizer(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Give both the run's tokenizer; see :meth:`RolloutEngine.configure_tokenizer`."""
        super().configure_tokenizer(tokenizer, chat_template_kwargs)
        self.reference_engine.configure_tokenizer(tokenizer, chat_template_kwargs)

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Start both engines, the reference's with the weights of its model; see :meth:`RolloutEngine.start`."""
        super().start(model, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=load_weights)
        self.reference_engine.start(
            self.reference_model or model, dtype=dtype, trust_remote_code=trust_remote_code, load_weights=True
        )

    def both(
        self, prompts: Sequence[Prompt], ours: SamplingSpec, theirs: SamplingSpec, iteration: int
    ) -> tuple[list[Sample], list[Sample]]:
        """Return the samples of both; engines that are shared, and so elsewhere, run at the same time."""
        if not self.engine.shared:
            return super().both(prompts, ours, theirs, iteration)
        with ThreadPoolExecutor(1, "rlhfkit-reference-samples") as executor:
            others = executor.submit(self.other_samples, prompts, theirs, iteration)
            made = self.engine.generate(prompts, ours, iteration=iteration)
            return made, others.result()

    def other_samples(self, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Return the reference's completions."""
        return self.reference_engine.generate(prompts, sampling, iteration=iteration)

    def sleep(self) -> None:
        """Free GPU memory of both; see :meth:`RolloutEngine.sleep`."""
        super().sleep()
        self.reference_engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        super().wake()
        self.reference_engine.wake()

    def close(self) -> None:
        """Free everything; a second call does nothing."""
        try:
            super().close()
        finally:
            self.reference_engine.close()
