"""``FakeEngine``: an engine that answers at once with samples of known lengths, as if it ran on GPUs elsewhere.

What is left of an iteration is what rlhfkit itself does on the ranks. Its samples depend on the prompt, the iteration
and the position in the group only, like those of a real engine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from rlhfkit import Prompt, RolloutEngine, Sample, SamplingSpec
from rlhfkit.rollout.engine import WeightSource, sample_seed


@dataclass(frozen=True)
class Lengths:
    """Lengths of completions: lognormal with this median, clipped to 1 ... ``longest``."""

    median: float
    sigma: float
    """Standard deviation of the log; 0: every completion has the median. With 0.99 p99 is 10 times the median."""
    longest: int

    def draw(self, seed: int) -> int:
        """The length of the completion of a seed, in tokens."""
        drawn = self.median * 2.718281828459045 ** (self.sigma * random.Random(seed).gauss(0.0, 1.0))
        return max(1, min(self.longest, round(drawn)))


class FakeEngine(RolloutEngine):
    """Returns random tokens below ``vocabulary``; ``shared``: one for all ranks, as a ``VLLMPool`` is."""

    can_score = False  # there is no model to probe after a weight sync

    def __init__(self, vocabulary: int, lengths: Lengths, *, shared: bool = False) -> None:
        self.vocabulary = vocabulary
        self.lengths = lengths
        self._shared = shared
        self.tokens = 0
        """Of all completions of the last call."""
        self.longest = 0
        """Tokens of the longest of them."""

    @property
    def shared(self) -> bool:
        """Whether all ranks share one engine."""
        return self._shared

    def start(
        self, model: str, *, dtype: torch.dtype, trust_remote_code: bool = False, load_weights: bool = False
    ) -> None:
        """Nothing is started."""
        self.version = 0 if load_weights else None

    def load(self, weights: WeightSource, version: int) -> None:
        """Read the weights to their end, a collective, and forget them."""
        for _name, _tensor in weights:
            pass
        self.version = version

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        """Make the samples at once."""
        size = sampling.group_size
        samples = [self._sample(prompt, index, sampling, iteration) for prompt in prompts for index in range(size)]
        lengths = [sample.num_tokens for sample in samples]
        self.tokens, self.longest = sum(lengths), max(lengths, default=0)
        return samples

    def _sample(self, prompt: Prompt, index: int, sampling: SamplingSpec, iteration: int) -> Sample:
        seed = sample_seed(sampling.seed, iteration, prompt.index, index)
        length = min(self.lengths.draw(seed), sampling.max_new_tokens)
        draw = numpy.random.default_rng(seed)
        return Sample.from_arrays(
            prompt,
            index,
            token_ids=draw.integers(4, self.vocabulary, length, dtype=numpy.int32),
            logprobs=-draw.random(length, dtype=numpy.float32),
            version_runs=[(self.version or 0, length)],
            finish_reason="stop" if length < sampling.max_new_tokens else "length",
        )

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """There is no model."""
        raise RuntimeError("FakeEngine has no model")
