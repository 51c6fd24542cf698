"""Scores of a reward model that is a child of the module, added to the rewards that samples have from the callback."""

from collections.abc import Sequence
from typing import Any

from rlhfkit.data.types import Experience, Sample


def scores_samples(trainer: Any) -> bool:
    """Whether the module scores samples itself: it says so (``scores_samples``), and has ``reward_model_scores()``.

    Args:
        trainer: With the module.
    """
    return bool(getattr(trainer.lightning_module, "scores_samples", False))


def add_model_scores(trainer: Any, samples: Sequence[Sample]) -> None:
    """Add the module's scores to the rewards, and as ``model`` to their parts. A collective, for the main thread.

    A sample that the callback's reward could not score keeps no reward.

    Args:
        trainer: With the module.
        samples: The same on every rank; changed in place.

    Raises:
        ValueError: If a part of the callback's reward is called ``model`` too.
    """
    if not samples:
        return
    if any("model" in sample.reward_parts for sample in samples):
        raise ValueError(
            "a part of RolloutCallback(reward=...) is called 'model', as the score of the module's reward_model is: "
            "give it another name"
        )
    scores = trainer.lightning_module.reward_model_scores(Experience.from_samples(samples)).tolist()
    for sample, score in zip(samples, scores, strict=True):
        sample.reward_parts["model"] = score
        if sample.reward is not None:
            sample.reward += score
