"""What samples look like, as plain numbers to log."""

import math
from collections.abc import Sequence

import torch

from rlhfkit.data.experience import Experience, Sample


def iteration_metrics(samples: Sequence[Sample], experience: Experience) -> dict[str, float]:
    """Metrics of one training iteration.

    Args:
        samples: All of them.
        experience: The same as tensors, prepared by the module.

    Returns:
        ``rollout/...``: rewards and their parts, lengths in tokens, and fractions of samples: cut off at the limit, not
        scored, without advantage.
    """
    rewards = experience.rewards[~experience.rewards.isnan()]
    lengths = torch.tensor([float(len(sample.token_ids)) for sample in samples])
    metrics = {
        "rollout/reward": float(rewards.mean()) if len(rewards) else math.nan,
        "rollout/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "rollout/length": float(lengths.mean()),
        "rollout/truncated_fraction": float(experience.truncated.float().mean()),
        "rollout/unscored_fraction": 1.0 - len(rewards) / len(samples),
    }
    for name, values in experience.reward_parts.items():
        metrics[f"rollout/reward_{name}"] = float(values[~values.isnan()].mean())
    if experience.advantages is not None:
        silent = ~(experience.advantages != 0).any(-1)
        metrics["rollout/zero_advantage_fraction"] = float(silent.float().mean())
    return metrics


def reward_values(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Total rewards and their parts, by name, of the samples that have them.

    Args:
        samples: Some may be without a reward, or without a part of it (missing or NaN).
    """
    scored = [sample for sample in samples if sample.reward is not None]
    values = {"reward": [sample.reward or 0.0 for sample in scored]}
    for name in sorted({name for sample in scored for name in sample.reward_parts}):
        parts = [sample.reward_parts.get(name, math.nan) for sample in scored]
        values[name] = [part for part in parts if not math.isnan(part)]
    return {name: found for name, found in values.items() if found}
