"""What is checked before a run: that engine, sampling, module and Trainer fit together, and every prompt.

A prompt that is too long would else stop the run in the iteration that draws it.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from rlhfkit.distributed import run_on_all_ranks
from rlhfkit.models.load import base_model_name, context_length, load_config, stop_token_ids
from rlhfkit.protocols import (
    ChecksColumns,
    ChecksEngine,
    ChecksPrompts,
    CorrectsOffPolicy,
    ExperienceLearner,
    GenerativeModule,
)
from rlhfkit.rewards.base import check_packages, reward_needs
from rlhfkit.rollout.engine import RolloutEngine, SamplingSpec
from rlhfkit.trainer_parts import compares_groups, datamodule_of

if TYPE_CHECKING:
    from rlhfkit.rollout.groups import GroupRunner


def check_reward(trainer: L.Trainer, reward: Any, *, fit: bool) -> None:
    """Check that what a reward needs is there: packages, and columns of validation and, to ``fit``, training data.

    A collective.

    Raises:
        ImportError: If a package is missing here.
        RuntimeError: If one is missing on another rank.
        ValueError: If the data has no answers, or not the columns that it reads.
    """
    run_on_all_ranks(lambda: check_packages(reward))
    data = datamodule_of(trainer)
    if not isinstance(data, ChecksColumns):
        return
    validated = isinstance(data, ChecksPrompts) and data.has_validation_prompts
    for name, needs in reward_needs(reward):
        for validation in [False] * fit + [True] * validated:
            data.check_columns(name, answer=needs.answer, columns=needs.columns, validation=validation)


def check_prompts(
    trainer: L.Trainer,
    module: GenerativeModule,
    engine: "RolloutEngine | GroupRunner",
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


def longest_prompt(
    engine: "RolloutEngine | GroupRunner", config: Any, sampling: SamplingSpec
) -> tuple[int, str] | None:
    """Tokens that a prompt may have so that the engine can answer it, and why; ``None``: no limit."""
    limits = {"the model's context": context_length(config), "the engine's max_model_len": engine.max_model_len}
    answer = 1 if engine.shortens_answers else sampling.max_new_tokens
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return None
    name = min(known, key=lambda one: known[one])
    room = f"{name} of {known[name]} less max_new_tokens {answer}" if answer > 1 else f"{name} of {known[name]}"
    return known[name] - answer, room


def check_learner(
    module: ExperienceLearner,
    engine: RolloutEngine,
    sampling: SamplingSpec,
    *,
    rewarded: bool,
    source: "RolloutEngine | GroupRunner",
) -> None:
    """Check that a module can learn from what the engine samples.

    Args:
        module: What learns.
        engine: What samples; told how its log-probs are read.
        sampling: How it samples.
        rewarded: Whether the callback has a reward.
        source: What gives the groups: the engine, or a group function that asks it.

    Raises:
        ValueError: If the module needs a reward, other groups, another engine, or log-probs that this one does not
            know.
    """
    if not rewarded and module.needs_reward:
        raise ValueError(
            f"{type(module).__name__} learns from rewards: give RolloutCallback(reward=...) any function of samples"
        )
    module.check_group_size(sampling.group_size)
    if isinstance(module, ChecksEngine):
        module.check_engine(source)
    check_logprobs(module, engine, sampling)


def check_sizes(module: ExperienceLearner, other_sizes: Mapping[int, int], group_size: int, groups: int) -> None:
    """Check that a module learns from groups of the sizes that a group function has returned.

    Args:
        module: What learns.
        other_sizes: Number of samples by prompt, of groups that have not ``group_size``.
        group_size: Samples of the other groups.
        groups: Number of groups.

    Raises:
        ValueError: If the module compares samples in a way that needs other groups.
    """
    sizes = {*other_sizes.values(), *([group_size] if len(other_sizes) < groups else [])}
    # A group that is too small has no advantage, which is no error unless all are; a loss of pairs needs each whole.
    for size in sorted(sizes) if compares_groups(module) else [max(sizes)]:
        try:
            module.check_group_size(size)
        except ValueError as error:
            prompt = next((index for index, count in other_sizes.items() if count == size), None)
            raise ValueError(
                f"the group function returned {size} sample(s) for prompt {prompt}, of which "
                f"{type(module).__name__} cannot learn: {error}"
            ) from None


def check_whole_iterations(trainer: L.Trainer) -> None:
    """Raise ValueError if the Trainer would leave out micro-batches of an iteration."""
    if trainer.limit_train_batches != 1.0 and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # set outside its class
        raise ValueError(
            f"limit_train_batches={trainer.limit_train_batches} would throw generated samples away, and so would "
            "overfit_batches: lower PromptDataModule(rollout_batch_size=...) instead"
        )


def check_logprobs(module: ExperienceLearner, engine: RolloutEngine, sampling: SamplingSpec) -> None:
    """Refuse to compare log-probs of a truncated distribution with the trainer's, which are of the whole one."""
    comparable = engine.configure_logprobs(sampling)
    if comparable and engine.quantized and isinstance(module, CorrectsOffPolicy):
        _correct_quantization(module)
    if comparable or not module.uses_rollout_logprobs:
        return
    default, chosen = dataclasses.asdict(SamplingSpec()), dataclasses.asdict(sampling)
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    forms = ("regex", "json_schema")
    fields = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens", *penalties, *forms)
    changed = [f"{name}={chosen[name]}" for name in fields if chosen[name] != default[name]]
    raise ValueError(
        f"{type(module).__name__} compares the engine's log-probs with its own (a correction, or a policy loss "
        f"that asks for them), and with SamplingSpec({', '.join(changed)}) {type(engine).__name__} does not "
        "know them as they were before truncation, so that every weight would be wrong: do not truncate (top_p=1, "
        "top_k=0, min_p=0, min_new_tokens=0), or sample at temperature=1, where vLLM knows them too, or use "
        "LocalEngine"
    )


def _correct_quantization(module: CorrectsOffPolicy) -> None:
    if module.correct_off_policy():
        rank_zero_info(
            "The engine is quantized, so the policy learns with truncated importance weights: Correction('tis') "
            "(NoCorrection() leaves them out); rollout_corr/... logs how much it differs from the policy."
        )
