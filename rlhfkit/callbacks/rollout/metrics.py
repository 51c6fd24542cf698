"""Metrics of samples: of a training iteration, of staleness, and of validation."""

import math
from collections.abc import Sequence
from statistics import fmean

import torch

from rlhfkit.data.types import Experience, Sample


def iteration_metrics(samples: Sequence[Sample], experience: Experience, *, rewarded: bool = True) -> dict[str, float]:
    """Metrics of one training iteration, from its samples and the same samples as tensors, prepared by the module.

    Returns:
        ``rollout/...``: means of rewards and their parts (if ``rewarded``), of lengths in tokens and of the numbers in
        ``Sample.info``; fractions of samples truncated at the length limit, not scored, or with advantage 0.
    """
    rewards = experience.rewards[~experience.rewards.isnan()]
    lengths = torch.tensor([float(sample.num_tokens) for sample in samples])
    metrics = {f"rollout/{name}": mean for name, mean in _info_means(samples).items()}
    metrics |= {
        "rollout/reward": float(rewards.mean()) if len(rewards) else math.nan,
        "rollout/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "rollout/length": float(lengths.mean()),
        "rollout/truncated_fraction": float(experience.truncated.float().mean()),
        "rollout/unscored_fraction": 1.0 - len(rewards) / len(samples),
    }
    for name, values in experience.reward_parts.items():
        metrics[f"rollout/reward_{name}"] = float(values[~values.isnan()].mean())
    for name, chosen in by_source(samples).items():
        scored = [sample.reward for sample in chosen if sample.reward is not None]
        metrics[f"rollout/reward/{name}"] = fmean(scored) if scored else math.nan
    if not rewarded:
        metrics = {name: value for name, value in metrics.items() if not name.startswith("rollout/reward")}
    if experience.advantages is not None:
        silent = ~(experience.advantages != 0).any(-1)
        metrics["rollout/zero_advantage_fraction"] = float(silent.float().mean())
    return metrics


def _info_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Means of the numbers in ``Sample.info``."""
    numbers: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.info.items():
            if isinstance(value, int | float):
                numbers.setdefault(name, []).append(float(value))
    return {name: fmean(values) for name, values in numbers.items()}


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Age of the tokens of an iteration when training on them begins at policy ``version`` (updates so far).

    Returns:
        ``rollout/staleness``: mean age of a token in updates; ``rollout/mixed_fraction``: fraction of samples with
        tokens of several policy versions.
    """
    runs = [sample.version_runs for sample in samples]
    known = [(each, count) for run in runs for each, count in run if each >= 0]
    tokens = sum(count for _, count in known)
    mixed = [len({each for each, _ in run}) > 1 for run in runs]
    return {
        "rollout/staleness": sum((version - each) * count for each, count in known) / tokens if tokens else 0.0,
        "rollout/mixed_fraction": fmean(mixed) if mixed else 0.0,
    }


def by_source(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by the ``source`` in their prompt's metadata; empty unless there are several sources."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        if "source" in sample.prompt.metadata:
            found.setdefault(str(sample.prompt.metadata["source"]), []).append(sample)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def reward_values(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Total rewards and their parts by name; missing and NaN values are left out."""
    scored = [sample for sample in samples if sample.reward is not None]
    values = {"reward": [sample.reward or 0.0 for sample in scored]}
    for name in sorted({name for sample in scored for name in sample.reward_parts}):
        parts = [sample.reward_parts.get(name, math.nan) for sample in scored]
        values[name] = [part for part in parts if not math.isnan(part)]
    return {name: found for name, found in values.items() if found}


def validation_metrics(
    samples: Sequence[Sample], *, success_threshold: float = 1.0, rewarded: bool = True
) -> dict[str, tuple[float, int]]:
    """Metrics of validation samples, and the number of samples or prompts that each is a mean of.

    With n > 1 samples per prompt, c of them correct, also the unbiased ``pass@k = 1 - C(n-c, k) / C(n, k)`` (Chen et
    al., 2021, arXiv:2107.03374, equation 1) for k = 1, 2, 4 ... n: the probability that one of k samples is correct.

    Args:
        samples: All samples of some prompts.
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


def _of_one_source(samples: Sequence[Sample], success_threshold: float, rewarded: bool) -> dict[str, tuple[float, int]]:
    metrics = {
        "length": (fmean(sample.num_tokens for sample in samples), len(samples)),
        "truncated_fraction": (fmean(sample.finish_reason == "length" for sample in samples), len(samples)),
    }
    if not rewarded:
        return metrics
    metrics |= {name: (fmean(values), len(values)) for name, values in reward_values(samples).items()}
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.index, []).append(sample)
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
