"""Metrics of the samples of a training iteration, and of their staleness."""

import math
from collections.abc import Mapping
from statistics import fmean

from torch import Tensor

from rlhfkit.callbacks.rollout.sharing import SharedIteration


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
        ``Sample.info``; fractions of samples truncated at the length limit or not scored, and of scored samples with
        advantage 0.
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
    if silent is not None and rewarded:
        silent = silent[~summary.rewards.isnan()]  # those without a reward count in unscored_fraction
    if silent is not None and len(silent):
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
