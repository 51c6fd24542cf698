"""Metrics of samples: of a training iteration, of staleness, and of validation."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, Self

from torch import Tensor

from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.data.types import Sample


def iteration_metrics(
    shared: SharedIteration, *, silent: Tensor | None = None, rewarded: bool = True
) -> dict[str, float]:
    """Metrics of one training iteration, over the samples of all ranks.

    Args:
        shared: The iteration.
        silent: (N,) whether the advantage of every token is 0; ``None``: there are no advantages.
        rewarded: Whether samples were scored.

    Returns:
        ``rollout/...``: means of rewards and their parts (if ``rewarded``), of lengths in tokens and of the numbers in
        ``Sample.info``; fractions of samples truncated at the length limit, not scored, or with advantage 0.
    """
    summary, numbers = shared.summary, shared.numbers
    rewards = summary.rewards[~summary.rewards.isnan()]
    metrics = {
        f"rollout/{name.removeprefix('info/')}": fmean(_known(values))
        for name, values in numbers.items()
        if name.startswith("info/") and _known(values)
    }
    metrics |= {
        "rollout/reward": float(rewards.mean()) if len(rewards) else math.nan,
        "rollout/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "rollout/length": float(numbers["completion_length"].float().mean()),
        "rollout/truncated_fraction": float(summary.truncated.float().mean()),
        "rollout/unscored_fraction": 1.0 - len(rewards) / len(summary),
    }
    for name, values in summary.reward_parts.items():
        metrics[f"rollout/reward_{name}"] = float(values[~values.isnan()].mean())
    for name, rows in shared.sources.items():
        scored = _known(numbers["reward"][rows])
        metrics[f"rollout/reward/{name}"] = fmean(scored) if scored else math.nan
    if not rewarded:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/reward")}
    if silent is not None:
        metrics["rollout/zero_advantage_fraction"] = float(silent.float().mean())
    return metrics


def _known(values: Tensor) -> list[float]:
    return values[~values.isnan()].tolist()


def staleness_metrics(numbers: Mapping[str, Tensor], version: int) -> dict[str, float]:
    """Age of the tokens of an iteration when training on them begins at policy ``version`` (updates so far).

    Returns:
        ``rollout/staleness``: mean age of a token in updates; ``rollout/mixed_fraction``: fraction of samples with
        tokens of several policy versions.
    """
    tokens, versions = float(numbers["version_tokens"].sum()), float(numbers["version_sum"].sum())
    return {
        "rollout/staleness": (version * tokens - versions) / tokens if tokens else 0.0,
        "rollout/mixed_fraction": float(numbers["mixed"].mean()),
    }


class SampleNumbers(NamedTuple):
    """What the metrics of validation need of a sample, which ranks exchange in place of its tokens."""

    prompt: int
    source: str | None
    reward: float | None
    reward_parts: dict[str, float]
    length: int
    truncated: bool

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """The numbers of a sample."""
        source = sample.prompt.metadata.get("source")
        return cls(
            sample.prompt.index,
            None if source is None else str(source),
            sample.reward,
            sample.reward_parts,
            sample.num_tokens,
            sample.finish_reason == "length",
        )


def by_source(samples: Sequence[SampleNumbers]) -> dict[str, list[SampleNumbers]]:
    """Samples by the ``source`` in their prompt's metadata; empty unless there are several sources."""
    found: dict[str, list[SampleNumbers]] = {}
    for sample in samples:
        if sample.source is not None:
            found.setdefault(sample.source, []).append(sample)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def reward_values(samples: Sequence[SampleNumbers]) -> dict[str, list[float]]:
    """Total rewards and their parts by name; missing and NaN values are left out."""
    scored = [sample for sample in samples if sample.reward is not None]
    values = {"reward": [sample.reward or 0.0 for sample in scored]}
    for name in sorted({name for sample in scored for name in sample.reward_parts}):
        parts = [sample.reward_parts.get(name, math.nan) for sample in scored]
        values[name] = [part for part in parts if not math.isnan(part)]
    return {name: found for name, found in values.items() if found}


def validation_metrics(
    samples: Sequence[SampleNumbers], *, success_threshold: float = 1.0, rewarded: bool = True
) -> dict[str, tuple[float, int]]:
    """Metrics of validation samples, and the number of samples or prompts that each is a mean of.

    With n > 1 samples per prompt, c of them correct, also the unbiased ``pass@k = 1 - C(n-c, k) / C(n, k)`` (Chen et
    al., 2021, arXiv:2107.03374, equation 1) for k = 1, 2, 4 ... n: the probability that one of k samples is correct.

    Args:
        samples: Numbers of all samples of some prompts.
        success_threshold: A sample with at least this reward is correct; one without a reward is not.
        rewarded: Whether samples were scored.

    Returns:
        ``reward`` and its parts, ``pass@k``, ``length`` in tokens, ``truncated_fraction``; with several sources also
        each with ``/<source>``.
    """
    metrics = _of_one_source(samples, success_threshold, rewarded)
    for name, chosen in by_source(samples).items():
        metrics |= {
            f"{key}/{name}": value for key, value in _of_one_source(chosen, success_threshold, rewarded).items()
        }
    return metrics


def _of_one_source(
    samples: Sequence[SampleNumbers], success_threshold: float, rewarded: bool
) -> dict[str, tuple[float, int]]:
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
    size = min(map(len, groups.values()), default=0)
    correct = [
        (len(group), sum(sample.reward is not None and sample.reward >= success_threshold for sample in group))
        for group in groups.values()
    ]
    k = 1
    while size > 1 and k <= size:
        chances = [1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in correct]
        metrics[f"pass@{k}"] = fmean(chances), len(chances)
        k *= 2
    return metrics
