"""GRPO and RLOO of TRL 1.16's command line."""

from typing import Any

from rlhfkit.cli.conversion.conversion import Configuration, Conversion
from rlhfkit.cli.conversion.trl import convert_moving_reference, convert_validation

LOSSES = {
    "grpo": "grpo_loss",
    "dr_grpo": "dr_grpo_loss",
    "dapo": "dapo_loss",
    "cispo": "cispo_loss",
    "sapo": "sapo_loss",
    "vespo": "vespo_loss",
    "luspo": "luspo_loss",
}
"""Policy losses that depend on nothing but the step; TRL's ``bnpo`` divides by the tokens of a micro-batch."""

TOKEN_MEANS = ("dapo", "cispo", "vespo")
"""Losses that TRL divides by the tokens of all updates of a generation, and we by those of the update."""

REWARDS = {"accuracy_reward": "rlhfkit.rewards.math_match"}
"""Rewards of TRL that one of ours grades with the same library."""

CORRECTIONS = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}


def convert_grpo(conversion: Conversion, devices: int) -> tuple[str, str]:
    """GRPO: the names of module and DataModule."""
    take, model = conversion.take, conversion.model
    loss = take("loss_type", "dapo")
    if loss not in LOSSES:
        conversion.differ(f"loss_type={loss!r}", f"one of {', '.join(LOSSES)} is converted")
    length = take("max_completion_length", 512)
    _convert_policy_loss(conversion, loss, length)
    scale = take("scale_rewards", "group")
    model["advantage_scale"] = {True: "group", False: "none"}.get(scale, scale)
    if (coefficient := take("entropy_coef", 0.0)) != 0.0:
        model["entropy_coef"] = coefficient
    vllm = take("use_vllm", False)
    model["correction"] = _correction(conversion) if vllm else "none"
    updates = _convert_batches(conversion, devices, length, group_size=8, vllm=vllm)
    if updates > 1 and loss in TOKEN_MEANS:
        conversion.differ(
            f"loss_type={loss!r} with {updates} updates of a generation",
            "TRL divides by the mean number of tokens of an update, we by its own number",
        )
    conversion.refuse(
        {
            "top_entropy_quantile": "GRPOModule(token_filter=TokenFilter(...)) has it",
            "use_adaptive_entropy": "GRPOModule(entropy_control=EntropyControl(...)) has it",
            "off_policy_mask_threshold": "GRPOModule(token_filter=TokenFilter(...)) has it",
            "multi_objective_aggregation": "WeightedSum(normalize=group_advantages) with advantage_scale='batch'",
            "cast_lm_head_to_fp32": "override build_policy()",
            "max_tool_calling_iterations": "EpisodeEngine(tools=...) has tools",
        },
        unless={
            "top_entropy_quantile": 1.0,
            "use_adaptive_entropy": False,
            "multi_objective_aggregation": "sum_then_normalize",
            "cast_lm_head_to_fp32": False,
        },
    )
    for name in ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"):
        take(name)
    return "rlhfkit.GRPOModule", "rlhfkit.PromptDataModule"


def convert_rloo(conversion: Conversion, devices: int) -> tuple[str, str]:
    """RLOO: the names of module and DataModule."""
    take, model = conversion.take, conversion.model
    low = take("epsilon", 0.2)
    model |= {
        "policy_loss": "rloo_loss",
        "advantages": "rloo_advantages",
        "clip_low": low,
        "clip_high": take("epsilon_high", low),
        "kl_coef": take("beta", 0.05),
        "whiten_advantages": take("normalize_advantages", False),
        "correction": "none",
    }
    if model["kl_coef"]:
        model |= {"kl_estimator": "k1", "kl_in_reward": "sequence"}
    if (bounds := take("reward_clip_range")) is not None:
        model["reward_processing"] = {"clip": bounds[1]}
        if bounds[0] != -bounds[1]:
            conversion.differ(f"reward_clip_range={bounds!r}", "rewards are clipped to a range around 0")
    length, vllm = take("max_completion_length", 512), take("use_vllm", False)
    _convert_batches(conversion, devices, length, group_size=2, vllm=vllm)
    return "rlhfkit.GRPOModule", "rlhfkit.PromptDataModule"


def _convert_policy_loss(conversion: Conversion, loss: str, length: int) -> None:
    """The loss, its bounds, and the KL penalty."""
    take, model = conversion.take, conversion.model
    low = take("epsilon", 0.2)
    high, level, beta = take("epsilon_high", low), take("importance_sampling_level", "token"), take("beta", 0.0)
    arguments: Configuration = {}
    model["policy_loss"] = LOSSES.get(loss, "dapo_loss")
    if level == "sequence" and loss == "grpo":
        model["policy_loss"] = "gspo_loss"
    elif (level == "sequence") != (loss == "luspo") and loss != "vespo":
        conversion.differ(f"importance_sampling_level={level!r}", "'sequence' with loss_type='grpo' (GSPO) or 'luspo'")
    if loss == "cispo":
        arguments["ratio_max"] = high
    elif loss not in ("sapo", "vespo"):
        model |= {"clip_low": low, "clip_high": high}
    for ours, (theirs, default) in {
        "temperature_positive": ("sapo_temperature_pos", 1.0),
        "temperature_negative": ("sapo_temperature_neg", 1.05),
        "k_positive": ("vespo_k_pos", 2.0),
        "lambda_positive": ("vespo_lambda_pos", 3.0),
        "k_negative": ("vespo_k_neg", 3.0),
        "lambda_negative": ("vespo_lambda_neg", 2.0),
    }.items():
        value = take(theirs, default)
        if theirs.startswith(loss):
            arguments[ours] = value
    if (delta := take("delta")) is not None:
        arguments["delta"] = delta
    if loss == "dr_grpo":
        model["max_length"] = length
    weighted = take("use_bias_correction_kl", True)
    if beta:
        model |= {"kl_coef": beta, "kl_estimator": "k3"}
        if weighted and level == "sequence":
            conversion.differ("use_bias_correction_kl", "with the ratio of a sequence in TRL, of a token here")
        elif weighted:
            model["kl_importance_weight"] = True
    if arguments:
        model["policy_loss_arguments"] = arguments


def _correction(conversion: Conversion) -> Any:
    """The importance correction of samples of vLLM."""
    take = conversion.take
    enabled, mode = (
        take("vllm_importance_sampling_correction", True),
        take("vllm_importance_sampling_mode", "sequence_mask"),
    )
    high = take("vllm_importance_sampling_clip_max", take("vllm_importance_sampling_cap", 3.0))
    low = take("vllm_importance_sampling_clip_min")
    if not enabled:
        return "none"
    level, kind = CORRECTIONS[mode]
    if low is not None and kind == "truncate":
        kind = "clip"
    return {"level": level, "mode": kind, "high": high} | ({} if low is None else {"low": low})


def _convert_batches(conversion: Conversion, devices: int, length: int, *, group_size: int, vllm: bool) -> int:
    """Prompts, samples, micro-batches and updates of an iteration; sampling and rewards. Returns the updates."""
    take, data, trainer = conversion.take, conversion.data, conversion.trainer
    group, micro = take("num_generations", group_size), take("per_device_train_batch_size", 8)
    accumulated = take("gradient_accumulation_steps", 1)
    micro_batches, samples = take("steps_per_generation"), take("generation_batch_size")
    if samples is None:
        samples = micro * devices * (micro_batches or accumulated)
    micro_batches = samples // (micro * devices)
    if samples % group or micro_batches % accumulated or micro_batches * micro * devices != samples:
        raise ValueError(
            f"a generation of {samples} samples is not a whole number of groups of {group} and of updates of "
            f"{accumulated} x {micro} samples on {devices} devices: give --devices, or correct the sizes"
        )
    updates = micro_batches // accumulated
    data |= {"rollout_batch_size": samples // group, "micro_batch_size": micro}
    trainer["accumulate_grad_batches"] = accumulated
    passes = take("num_iterations", 1)
    if passes > 1:
        data["epochs_per_iteration"] = passes
    steps, epochs = take("max_steps", -1), take("num_train_epochs", 3.0)
    if steps > 0:
        trainer |= {"max_steps": steps, "max_epochs": -1}
    else:
        conversion.differ(
            f"num_train_epochs={epochs}", "counts passes over the prompts, which are not read here: give max_steps"
        )
    sampling = {
        "group_size": group,
        "max_new_tokens": length,
        "temperature": take("temperature", 1.0),
        "top_p": take("top_p", 1.0),
        "top_k": take("top_k", 0),
        "min_p": take("min_p", 0.0),
        "repetition_penalty": take("repetition_penalty", 1.0),
        "seed": data["seed"],
    }
    if (pattern := take("vllm_structured_outputs_regex")) is not None:
        sampling["regex"] = pattern
    convert_moving_reference(conversion)
    if not take("shuffle_dataset", True):
        data["shuffle"] = False
    if (arguments := take("chat_template_kwargs")) is not None:
        data["chat_template_kwargs"] = arguments
    if take("mask_truncated_completions", False):
        conversion.model["mask_truncated"] = True
    _convert_callback(conversion, sampling, devices if vllm else None)
    convert_validation(conversion, updates_per_epoch=updates * passes)
    conversion.refuse(
        {
            "generation_kwargs": "SamplingSpec has what all engines do exactly",
            "cache_implementation": "LocalEngine has a cache of its own",
            "disable_dropout": "dropout is always off for modules that sample",
        },
        unless={"disable_dropout": True},
    )
    return int(updates)


def _convert_callback(conversion: Conversion, sampling: Configuration, engines_on: int | None) -> None:
    """Rewards and the engine."""
    take = conversion.take
    functions, weights = take("reward_funcs", []), take("reward_weights")
    functions = [functions] if isinstance(functions, str) else functions
    unknown = [name for name in functions if name not in REWARDS]
    if unknown:
        conversion.differ(f"reward_funcs={unknown!r}", "a function of samples is to be written, see docs/rewards.md")
    if len(functions) > 1 or weights is not None:
        conversion.differ("several rewards", "rlhfkit.rewards.WeightedSum(parts={name: (reward, weight)}) sums them")
    arguments: Configuration = {"sampling": sampling}
    if functions:
        arguments["reward"] = REWARDS.get(functions[0], functions[0])
        conversion.data["answer"] = "solution"
        conversion.notes.append("accuracy_reward reads the column 'solution', so answer: solution")
    if (reward_model := take("reward_model_name_or_path")) is not None:
        conversion.model["reward_model"] = reward_model
    if (samples := take("num_generations_eval", sampling["group_size"])) != sampling["group_size"]:
        arguments["validation_sampling"] = {**sampling, "group_size": samples}
    if engines_on is not None:
        arguments["engine"] = {"class_path": "rlhfkit.VLLMPool", "init_args": _engine(conversion, engines_on)}
    conversion.callback("rlhfkit.RolloutCallback", **arguments)


def _engine(conversion: Conversion, devices: int) -> Configuration:
    take = conversion.take
    processes = take("vllm_tensor_parallel_size", 1)
    engine: Configuration = {
        "colocate": True,
        "num_engines": max(devices // processes, 1),
        "tensor_parallel_size": processes,
        "gpu_memory_utilization": take("vllm_gpu_memory_utilization", 0.3),
    }
    if (length := take("vllm_max_model_length")) is not None:
        engine["max_model_len"] = length
    take("vllm_enable_sleep_mode")
    conversion.refuse(
        {
            "vllm_mode": "a pool starts its engines; VLLMServer(url=...) joins a server",
            "vllm_model_impl": "VLLMPool(engine_arguments={'model_impl': ...})",
        },
        unless={"vllm_mode": "colocate", "vllm_model_impl": "vllm"},
    )
    return engine
