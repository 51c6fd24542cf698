"""Validation: prompts are answered, scored, and described by metrics that count prompts and sources."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, Self

import lightning as L

from rlhfkit.callbacks.rollout.checks import check_prompts
from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.distributed import gather_objects
from rlhfkit.rewards.base import AnswerReader, answer_reader
from rlhfkit.rewards.benchmarks import subset_metrics
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.trainer_parts import policy_of
from rlhfkit.validation import check_number

_DRAWS = 100
"""Subsets of the samples of a prompt that maj@k is a mean over, where there are more; ``rlhfkit evaluate`` draws 1000,
which takes about 10 ms a prompt."""


class Validation(RolloutPart):
    """Answers and scores the prompts of validation with the current policy, in one or several ways.

    Logs ``val/reward``, its parts, lengths and truncated answers; with several samples per prompt also ``val/pass@k``,
    ``val/avg@n``, ``val/best@k`` and, for rewards that read answers (``math_match``, ``exact_match``), ``val/maj@k``. A
    ``RolloutCallback`` has it by default.

    Args:
        sampling: How to sample; ``None``: one greedy completion per prompt, of the same length as in training. A
            mapping gives several ways by name, with metrics ``val/<name>/reward`` and so on.
        success_threshold: A sample with at least this reward counts as correct in ``val/pass@k``.

    Raises:
        ValueError: If ``success_threshold`` is no number.
    """

    def __init__(
        self, sampling: SamplingSpec | Mapping[str, SamplingSpec | Any] | None = None, success_threshold: float = 1.0
    ) -> None:
        check_number("success_threshold", success_threshold)
        self.sampling = None if sampling is None else _made(sampling)
        self.success_threshold = success_threshold
        self._of_sources: dict[str, list[tuple[float, int]]] = {}  # by name and source: a mean and its count per batch
        self._sources: set[str] = set()

    @property
    def ways(self) -> dict[str, SamplingSpec]:
        if isinstance(self.sampling, Mapping):
            return dict(self.sampling)
        if self.sampling is not None:
            return {"": self.sampling}
        return {"": self.rollouts.sampling.greedy()}

    def setup(self, trainer: L.Trainer) -> None:
        for sampling in self.ways.values():
            source = self.rollouts.collector.policy_source
            check_prompts(trainer, policy_of(trainer), source, sampling, validation=True)

    def validate(self, trainer: L.Trainer, prompts: Sequence[Prompt], *, first: bool) -> None:
        if first:
            self.begin()
        rollouts = self.rollouts
        of_all = [prompt for share in gather_objects(list(prompts)) for prompt in share]
        sampled = rollouts.sample(of_all, self.ways)
        rewarded = rollouts.reward is not None or policy_of(trainer).scorer is not None
        metrics = self.batch_metrics(sampled, rewarded=rewarded, read=answer_reader(rollouts.reward))
        log_validation(trainer.lightning_module, metrics)

    def begin(self) -> None:
        self._of_sources, self._sources = {}, set()

    def end_validation(self, trainer: L.Trainer) -> None:
        log_validation(trainer.lightning_module, self.source_metrics())

    def batch_metrics(
        self, sampled: Mapping[str, list[Sample]], *, rewarded: bool, read: AnswerReader | None = None
    ) -> dict[str, tuple[float, int]]:
        """Metrics of a batch of prompts, over the samples of all ranks, by the name that they are logged under.

        Those of each source are kept for :meth:`source_metrics`. A collective.

        Args:
            sampled: This rank's samples by way.
            rewarded: Whether they were scored.
            read: Reads their answers for majority votes; ``None``: there are none.

        Returns:
            The mean of each metric, and how many samples or prompts it is of.
        """
        found: dict[str, tuple[float, int]] = {}
        for way, samples in sampled.items():
            prefix = f"val/{way}/" if way else "val/"
            voting = read if self.ways[way].group_size > 1 else None
            own = [SampleNumbers.of(sample, voting) for sample in samples]
            numbers = [each for share in gather_objects(own) for each in share]
            describe = partial(
                validation_metrics,
                success_threshold=self.success_threshold,
                rewarded=rewarded,
                votes=voting is not None,
            )
            metrics = describe(numbers)
            found |= {prefix + name: value for name, value in metrics.items()}
            for source, chosen in by_source(numbers).items():
                self._sources.add(source)
                of_source = metrics if len(chosen) == len(numbers) else describe(chosen)
                for name, value in of_source.items():
                    self._of_sources.setdefault(f"{prefix}{name}/{source}", []).append(value)
        return found

    def source_metrics(self) -> dict[str, tuple[float, int]]:
        """Metrics of each source over all batches of this validation, as ``<name>/<source>``; none of a single source.

        Only at the end is it known whether there are several: sources follow one another, so a batch may have one.
        """
        if len(self._sources) < 2:
            return {}
        return {name: _mean(batches) for name, batches in self._of_sources.items()}


def _made(sampling: SamplingSpec | Mapping[str, Any]) -> SamplingSpec | dict[str, SamplingSpec]:
    """Settings, or several by name, of which each may be given as a mapping."""
    if isinstance(sampling, SamplingSpec):
        return sampling
    if not all(isinstance(one, SamplingSpec | Mapping) for one in sampling.values()):
        return SamplingSpec(**sampling)
    return {name: one if isinstance(one, SamplingSpec) else SamplingSpec(**one) for name, one in sampling.items()}


def log_validation(module: L.LightningModule, metrics: Mapping[str, tuple[float, int]]) -> None:
    """Log means, each over a number of samples or prompts of all ranks."""
    for name, (mean, count) in metrics.items():
        module.log(name, mean, prog_bar=name.endswith("/reward"), batch_size=count, sync_dist=True)


class SampleNumbers(NamedTuple):
    """What the metrics of validation need of a sample, which ranks exchange in place of its tokens."""

    prompt: int
    source: str | None
    reward: float | None
    reward_parts: dict[str, float]
    length: int
    truncated: bool
    vote: str | None = None

    @classmethod
    def of(cls, sample: Sample, read: AnswerReader | None = None) -> Self:
        """The numbers of a sample, and its answer as ``read`` finds it."""
        source = sample.prompt.metadata.get("source")
        return cls(
            sample.prompt.index,
            None if source is None else str(source),
            sample.reward,
            sample.reward_parts,
            sample.num_tokens,
            sample.finish_reason == "length",
            None if read is None else read(sample),
        )


def by_source(samples: Sequence[SampleNumbers]) -> dict[str, list[SampleNumbers]]:
    """Samples by the ``source`` in their prompt's metadata; those without one are left out."""
    found: dict[str, list[SampleNumbers]] = {}
    for sample in samples:
        if sample.source is not None:
            found.setdefault(sample.source, []).append(sample)
    return dict(sorted(found.items()))


def _mean(batches: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """The mean over batches of a mean and its count each, and the whole count."""
    count = sum(number for _, number in batches)
    return math.fsum(mean * number for mean, number in batches) / count, count


def reward_values(samples: Sequence[SampleNumbers]) -> dict[str, list[float]]:
    """Total rewards and their parts by name; missing and NaN values are left out."""
    scored = [sample for sample in samples if sample.reward is not None]
    values = {"reward": [sample.reward or 0.0 for sample in scored]}
    for name in sorted({name for sample in scored for name in sample.reward_parts}):
        parts = [sample.reward_parts.get(name, math.nan) for sample in scored]
        values[name] = [part for part in parts if not math.isnan(part)]
    return {name: found for name, found in values.items() if found}


def validation_metrics(
    samples: Sequence[SampleNumbers], *, success_threshold: float = 1.0, rewarded: bool = True, votes: bool = False
) -> dict[str, tuple[float, int]]:
    """Metrics of validation samples, and the number of samples or prompts that each is a mean of.

    With n > 1 samples per prompt also, as ``rlhfkit evaluate``, those of k = 1, 2, 4 ... and n of them
    (:func:`~rlhfkit.rewards.benchmarks.subset_metrics`).

    Args:
        samples: Numbers of all samples of some prompts.
        success_threshold: A sample with at least this reward is correct; one without a reward is not.
        rewarded: Whether samples were scored.
        votes: Whether samples were read for votes.

    Returns:
        ``reward`` and its parts, those of k samples, ``length`` in tokens, ``truncated_fraction``.
    """
    metrics = {
        "length": (fmean(sample.length for sample in samples), len(samples)),
        "truncated_fraction": (fmean(sample.truncated for sample in samples), len(samples)),
    }
    if not rewarded:
        return metrics
    metrics |= {name: (fmean(values), len(values)) for name, values in reward_values(samples).items()}
    groups: dict[int, list[SampleNumbers]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    if min(map(len, groups.values())) < 2:
        return metrics
    of_subsets = subset_metrics(
        [[one.reward for one in group] for group in groups.values()],
        [[one.vote for one in group] for group in groups.values()] if votes else None,
        success_threshold=success_threshold,
        draws=_DRAWS,
    )
    return metrics | {name: (value, len(groups)) for name, value in of_subsets.items()}
