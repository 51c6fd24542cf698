"""How long a prompt may be for an engine to answer it, known before the engine is started."""

from typing import Any

from rlhfkit.models.load import context_length
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec


def longest_prompt(engine: RolloutEngine, config: Any, sampling: SamplingSpec) -> tuple[int, str] | None:
    """Tokens that a prompt may have, and why.

    Args:
        engine: What generates.
        config: Of the model, of Transformers.
        sampling: How is sampled.

    Returns:
        ``None`` where there is no limit.
    """
    limits = {"the model's context": context_length(config), "the engine's max_model_len": engine.max_model_len}
    answer = 1 if engine.shortens_answers else sampling.max_new_tokens
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda one: known[one])
    room = f"{name} of {known[name]} less max_new_tokens {answer}" if answer > 1 else f"{name} of {known[name]}"
    return known[name] - answer, room
