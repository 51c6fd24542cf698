"""A look at all prompts before a run begins: one that is too long would stop it in the iteration that draws it."""

from typing import Any

from rlhfkit.models.load import base_model_name, load_config, stop_token_ids
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.rollout.prompt_room import longest_prompt


def check_prompts(
    trainer: Any, module: Any, engine: RolloutEngine, sampling: SamplingSpec, *, validation: bool = False
) -> None:
    """Have the DataModule check its prompts against what will generate.

    DataModules without a method ``check_prompts``, streams among them, have theirs checked when they are drawn.

    Args:
        trainer: Of the run; its DataModule is open.
        module: Being trained; its ``model_name`` says which model generates.
        engine: What generates.
        sampling: How is sampled.
        validation: Check the prompts of validation, if there are any, instead of those of training.

    Raises:
        ValueError: If a prompt leaves no room for an answer or has a token that the model does not know, or nothing
            would end an answer.
    """
    check = getattr(trainer.datamodule, "check_prompts", None)
    model = getattr(module, "model_name", None)
    if check is None or not isinstance(model, str) or engine.recorded:
        return
    if validation and getattr(trainer.datamodule, "validation_data", None) is None:
        return
    trusted = bool(getattr(module, "trust_remote_code", False))
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
    check(longest=longest, reason=reason, vocabulary=vocabulary, validation=validation)
