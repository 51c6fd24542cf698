"""How long a prompt may be for an engine to answer it, known before the engine is started."""

from typing import Any

from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec


def context_length(config: Any) -> int | None:
    """Tokens that a model can see.

    Args:
        config: Of Transformers.

    Returns:
        ``None`` for models that see everything, such as recurrent ones.
    """
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len", "context_length"))
    return next((int(length) for length in named if length), None)


def longest_prompt(engine: RolloutEngine, config: Any, sampling: SamplingSpec) -> tuple[int, str] | None:
    """Tokens that a prompt may have, and why.

    Args:
        engine: What generates. Engines of episodes shorten answers to the room there is; others do not.
        config: Of the model, of Transformers.
        sampling: How is sampled.

    Returns:
        ``None`` where there is no limit.
    """
    limits = {"the model's context": context_length(config)}
    answer = sampling.max_new_tokens
    inner: Any = engine
    while isinstance(getattr(inner, "engine", None), RolloutEngine):
        if hasattr(inner, "max_episode_tokens"):
            limits["max_episode_tokens"] = inner.max_episode_tokens
            answer = 1
        inner = inner.engine
    limits["max_model_len"] = getattr(inner, "max_model_len", None)
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda one: known[one])
    room = f"{name} of {known[name]} less max_new_tokens {answer}" if answer > 1 else f"{name} of {known[name]}"
    return known[name] - answer, room
