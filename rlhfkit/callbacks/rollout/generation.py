"""``Generation``: prompts shared out to the ranks, sampled, scored, and put back in order."""

from collections.abc import Callable, Sequence
from typing import Any

from rlhfkit.callbacks.rollout.timing import Timing
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.rewards.base import Reward, score_samples
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.streams import GroupStream


class Generation:
    """Samples of prompts from one engine, the same on every rank.

    Args:
        engine: What generates.
        reward: What scores; ``None``: every sample gets 0, for modules that need no reward.
        timing: Told how long it takes.
    """

    def __init__(self, engine: RolloutEngine, reward: Reward | None, timing: Timing) -> None:
        self.engine = engine
        self.reward = reward
        self.timing = timing

    def sample(
        self, trainer: Any, prompts: Sequence[Prompt], sampling: SamplingSpec, iteration: int, *, group: Any = None
    ) -> list[Sample]:
        """Scored samples of the prompts. A collective.

        Args:
            trainer: Tells the ranks apart.
            prompts: The same on every rank.
            sampling: How to sample.
            iteration: Goes into each sample's seed.
            group: The ranks' process group; ``None``: the default one.

        Returns:
            ``len(prompts) * group_size`` samples, group by group.
        """
        if self.engine.shared:
            share = list(prompts) if trainer.global_rank == 0 else []
        else:
            share = list(prompts)[trainer.global_rank :: trainer.world_size]
        parts = run_on_all_ranks(lambda: self.sample_here(trainer, share, sampling, iteration), group=group)
        if self.engine.shared:
            return parts[0]
        groups = [found for part in parts for found in grouped(part, sampling.group_size)]
        position = {prompt.index: place for place, prompt in enumerate(prompts)}
        groups.sort(key=lambda found: position[found[0].prompt.index])
        return [sample for found in groups for sample in found]

    def sample_here(self, trainer: Any, prompts: list[Prompt], sampling: SamplingSpec, iteration: int) -> list[Sample]:
        """Sample and score on this rank. No collective."""
        if not prompts:
            return []
        with self.timing.record("generate", iteration):
            samples = self.engine.generate(prompts, sampling, iteration=iteration)
        if len(samples) != len(prompts) * sampling.group_size:
            raise RuntimeError(
                f"the engine was asked for {len(prompts)} x {sampling.group_size} samples and returned {len(samples)}"
            )
        self.score(trainer, samples, iteration)
        return samples

    def score(self, trainer: Any, samples: list[Sample], iteration: int) -> None:
        """Fill in texts and rewards.

        Args:
            trainer: Its module has the tokenizer.
            samples: Changed in place.
            iteration: That they are a part of.
        """
        tokenizer = trainer.lightning_module.tokenizer
        texts = tokenizer.batch_decode([sample.token_ids for sample in samples], skip_special_tokens=True)
        for sample, text in zip(samples, texts, strict=True):
            sample.text = text
        if self.reward is None:
            for sample in samples:
                sample.reward = 0.0
            return
        with self.timing.record("score", iteration):
            score_samples(self.reward, samples)


def grouped(samples: list[Sample], size: int) -> list[list[Sample]]:
    """Samples that lie group by group, as groups.

    Args:
        samples: A multiple of ``size``.
        size: Of a group.
    """
    return [samples[first : first + size] for first in range(0, len(samples), size)]


class ScoredStream:
    """A stream whose groups are scored as they are given, so that what is dropped is never scored.

    Args:
        stream: Of the engine.
        generation: Scores.
        trainer: Its module has the tokenizer.
        iteration: That the groups are a part of.
        then: What else is done to samples that were scored; ``None``: nothing.
    """

    def __init__(
        self,
        stream: GroupStream,
        generation: Generation,
        trainer: Any,
        iteration: int,
        then: Callable[[list[Sample]], None] | None = None,
    ) -> None:
        self._stream = stream
        self._then = then
        self._generation = generation
        self._trainer = trainer
        self._iteration = iteration

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """See :class:`~rlhfkit.rollout.streams.GroupStream`."""
        self._stream.submit(prompts)

    def collect(self, most: int) -> list[list[Sample]]:
        """See :class:`~rlhfkit.rollout.streams.GroupStream`."""
        with self._generation.timing.record("generate", self._iteration):
            groups = self._stream.collect(most)
        if groups:
            samples = [sample for group in groups for sample in group]
            self._generation.score(self._trainer, samples, self._iteration)
            if self._then is not None:
                self._then(samples)
        return groups

    def close(self) -> None:
        """See :class:`~rlhfkit.rollout.streams.GroupStream`."""
        self._stream.close()
