"""Check all prompts before a run: one that is too long would stop it in the iteration that draws it."""

from typing import Any

import lightning as L

from rlhfkit.models.load import base_model_name, context_length, load_config, stop_token_ids
from rlhfkit.protocols import ChecksPrompts, GenerativeModule, datamodule_of
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec


def check_prompts(
    trainer: L.Trainer,
    module: GenerativeModule,
    engine: RolloutEngine,
    sampling: SamplingSpec,
    *,
    validation: bool = False,
) -> None:
    """Have the DataModule check its training or validation prompts against the model and engine.

    DataModules that do not implement :class:`~rlhfkit.protocols.ChecksPrompts` check prompts when they are drawn.

    Raises:
        ValueError: If a prompt leaves no room for an answer or has an unknown token, or nothing would end an answer.
    """
    data = datamodule_of(trainer)
    if not isinstance(data, ChecksPrompts) or engine.recorded or (validation and not data.has_validation_prompts):
        return
    model, trusted = module.model_name, module.trust_remote_code
    config = load_config(model, trust_remote_code=trusted)
    stops = stop_token_ids(base_model_name(model), module.tokenizer, trust_remote_code=trusted)
    if not (stops or sampling.stop or sampling.stop_token_ids):
        raise ValueError(
            f"nothing ends an answer of {model}: its tokenizer has no end-of-sequence token (tokenizer.eos_token is "
            "None), nor has its generation_config.json. Set tokenizer.eos_token and save it with the model, or give "
            "SamplingSpec(stop_token_ids=...) or SamplingSpec(stop=...)"
        )
    room = longest_prompt(engine, config, sampling)
    if room is None:
        return
    longest, reason = room
    if longest < 1:
        raise ValueError(
            f"no prompt has room: {reason} is {longest}. Lower SamplingSpec(max_new_tokens=...) or use a model with a "
            "longer context"
        )
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    data.check_prompts(longest=longest, reason=reason, vocabulary=vocabulary, validation=validation)


def longest_prompt(engine: RolloutEngine, config: Any, sampling: SamplingSpec) -> tuple[int, str] | None:
    """Tokens that a prompt may have so that the engine can answer it, and why; ``None``: no limit."""
    limits = {"the model's context": context_length(config), "the engine's max_model_len": engine.max_model_len}
    answer = 1 if engine.shortens_answers else sampling.max_new_tokens
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda one: known[one])
    room = f"{name} of {known[name]} less max_new_tokens {answer}" if answer > 1 else f"{name} of {known[name]}"
    return known[name] - answer, room
