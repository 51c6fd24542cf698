"""Configurations of TRL 1.16's command line: what its trainers share, and SFT, reward models, DPO and KTO.

The defaults are those of ``transformers.TrainingArguments`` 5.19 and of TRL's own configurations.
"""

from collections.abc import Callable, Mapping

from rlhfkit.cli.conversion.conversion import Conversion

HARMLESS = frozenset(
    [
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_in_order",
        "dataset_num_proc",
        "output_dir",
        "overwrite_output_dir",
        "run_name",
        "project",
        "hub_model_id",
        "hub_strategy",
        "hub_token",
        "hub_private_repo",
        "hub_revision",
        "hub_always_push",
        "push_to_hub",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "logging_first_step",
        "logging_nan_inf_filter",
        "disable_tqdm",
        "skip_memory_metrics",
        "include_num_input_tokens_seen",
        "pad_to_multiple_of",
        "padding_free",
        "use_cache",
        "torch_empty_cache_steps",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "remove_unused_columns",
        "gradient_checkpointing_kwargs",
        "do_train",
        "per_device_eval_batch_size",
        "activation_offloading",
        "use_liger_kernel",
        "liger_kernel_config",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "log_completions",
        "num_completions_to_print",
        "log_unique_prompts",
        "log_multimodal",
        "precompute_ref_batch_size",
        "vllm_group_port",
        "eval_packing",
        "local_rank",
        "report_to",
        "save_only_model",
        "lora_task_type",
        "ds3_gather_for_generation",
        "resume_from_checkpoint",
    ]
)
"""Options that change speed, memory, logs or files only."""

LEARNING_RATES = {"sft": 2e-5, "reward": 1e-4, "dpo": 1e-6, "kto": 1e-6, "grpo": 1e-6, "rloo": 1e-6}


def convert_shared(conversion: Conversion, kind: str) -> None:
    """Model, optimizer, precision, length of the run, and checkpoints."""
    take, model, trainer = conversion.take, conversion.model, conversion.trainer
    model["model"] = take("model_name_or_path")
    if model["model"] is None:
        raise ValueError("the configuration has no model_name_or_path")
    model["lr"] = float(take("learning_rate", LEARNING_RATES[kind]))
    model["weight_decay"] = float(take("weight_decay", 0.0))
    model["betas"] = [take("adam_beta1", 0.9), take("adam_beta2", 0.999)]
    model["gradient_checkpointing"] = take("gradient_checkpointing", True)
    if take("trust_remote_code", False):
        model["trust_remote_code"] = True
    if (coefficient := take("router_aux_loss_coef")) is not None:
        model["router_aux_loss_coef"] = coefficient
    if (attention := take("attn_implementation")) is not None:
        model["attention"] = attention
    _convert_schedule(conversion)
    _convert_precision(conversion)
    _convert_adapters(conversion)
    if model["weight_decay"] and "lora" not in model:  # Transformers leaves norms and biases out
        model["parameter_options"] = {"vectors": {"weight_decay": 0.0}}
    trainer["gradient_clip_val"] = take("max_grad_norm", 1.0)
    trainer["log_every_n_steps"] = conversion.take_steps("logging_steps", 10)
    take("logging_strategy")
    _convert_checkpoints(conversion, kind)
    if (optimizer := take("optim", "adamw_torch_fused")) not in ("adamw_torch_fused", "adamw_torch"):
        conversion.differ(f"optim={optimizer!r}", "only AdamW is converted; module argument optimizer= takes others")
    conversion.refuse(
        {
            "adam_epsilon": "AdamW's epsilon is 1e-8",
            "model_revision": "a hub name is its main branch: name a folder",
            "model_init_kwargs": "override build_policy()",
            "load_in_8bit": "weights are held in 4 bits or whole",
            "deepspeed": "RLHFDeepSpeedStrategy(stage=...) takes its place",
            "fsdp": "RLHFDeepSpeedStrategy(stage=3) takes its place",
            "parallelism_config": "RLHFDeepSpeedStrategy has sequence_parallel_size= and tensor_parallel_size=",
            "chat_template_path": "save the tokenizer with its template into the model's folder",
            "eos_token": "save the tokenizer with its token into the model's folder",
            "pad_token": "save the tokenizer with its token into the model's folder",
        },
        unless={"adam_epsilon": 1e-8, "model_revision": "main", "load_in_8bit": False},
    )


def _convert_checkpoints(conversion: Conversion, kind: str) -> None:
    """When the run is saved."""
    strategy = conversion.take("save_strategy", "steps")
    keep, steps = conversion.take("save_total_limit"), conversion.take_steps("save_steps", 500)
    if strategy == "no":
        conversion.trainer["enable_checkpointing"] = False
        return
    if strategy not in ("steps", "epoch"):
        conversion.differ(f"save_strategy={strategy!r}", "one of steps, epoch, no is converted")
    if strategy == "epoch" and kind in ("grpo", "rloo"):
        conversion.differ("save_strategy='epoch'", "an epoch is an iteration here: give save_steps")
    when = {"every_n_epochs": 1} if strategy == "epoch" else {"every_n_train_steps": steps}
    which = {"save_top_k": -1} if keep is None else {"monitor": "step", "mode": "max", "save_top_k": keep}
    conversion.callback("lightning.pytorch.callbacks.ModelCheckpoint", **when, **which)


def _convert_schedule(conversion: Conversion) -> None:
    schedule, warmup = conversion.take("lr_scheduler_type", "linear"), conversion.take_steps("warmup_steps", 0)
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if schedule not in names:
        conversion.differ(f"lr_scheduler_type={schedule!r}", f"one of {', '.join(names)} is converted")
    if schedule == "constant":  # Transformers' has no warm-up
        warmup = 0
    conversion.model |= {"lr_schedule": names.get(schedule, "constant"), "warmup_steps": warmup}


def _convert_precision(conversion: Conversion) -> None:
    dtype, half = conversion.take("dtype", "float32"), conversion.take("fp16", False)
    mixed = conversion.take("bf16", not half)
    if half:
        conversion.trainer["precision"] = "16-mixed"
    elif mixed:
        conversion.trainer["precision"] = "bf16-true" if dtype == "bfloat16" else "bf16-mixed"
    else:
        conversion.trainer["precision"] = {"bfloat16": "bf16-true", "float16": "16-true"}.get(dtype, "32-true")
    if dtype not in ("float32", "bfloat16", "float16"):
        conversion.differ(f"dtype={dtype!r}", "one of float32, bfloat16, float16 is converted")


def _convert_adapters(conversion: Conversion) -> None:
    take = conversion.take
    rank, alpha, dropout = take("lora_r", 16), take("lora_alpha", 32), take("lora_dropout", 0.05)
    targets, rslora, dora = take("lora_target_modules"), take("use_rslora", False), take("use_dora", False)
    conversion.refuse(
        {
            "lora_modules_to_save": "engines cannot take modules that are trained beside adapters",
            "lora_target_parameters": "LoRA(experts=True) adapts the experts of a mixture, nothing else",
        },
        unless={},
    )
    if take("load_in_4bit", False):
        conversion.model["quantization"] = "nf4"
        if take("bnb_4bit_quant_type", "nf4") != "nf4":
            conversion.differ("bnb_4bit_quant_type", "nf4 is the only type")
        if not take("use_bnb_nested_quant", False):
            conversion.differ("use_bnb_nested_quant=False", "scales are always quantized once more here")
    for name in ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"):
        take(name)
    if not take("use_peft", False):
        return
    if targets is None:
        conversion.differ("lora_target_modules", "peft's choice for the model's family; here all linear layers")
    if isinstance(targets, list) and len(targets) == 1 and targets[0] == "all-linear":
        targets = "all-linear"
    conversion.model["lora"] = {
        "rank": rank,
        "alpha": float(alpha),
        "dropout": dropout,
        "targets": targets or "all-linear",
        "rslora": rslora,
        "dora": dora,
    }


def convert_source(conversion: Conversion) -> None:
    """Where the rows are, and their order."""
    take, data = conversion.take, conversion.data
    data["data"] = take("dataset_name")
    if data["data"] is None:
        raise ValueError("the configuration has no dataset_name")
    data["split"] = take("dataset_train_split", "train")
    if (subset := take("dataset_config")) is not None:
        data["subset"] = subset
    data["seed"] = take("data_seed", take("seed", 42))
    conversion.refuse(
        {
            "dataset_streaming": "StreamingSFTDataModule and its like (docs/data.md) read streams",
            "datasets": "data: {file: weight} mixes several",
            "dataset_kwargs": "columns decide what kind of data it is",
        },
        unless={"dataset_streaming": False},
    )


def convert_validation(conversion: Conversion, *, updates_per_epoch: int | None = None) -> None:
    """When held-out rows are validated; with own samples an epoch is an iteration of so many updates."""
    take, data, trainer = conversion.take, conversion.data, conversion.trainer
    split, strategy = take("dataset_test_split", "test"), take("eval_strategy", "no")
    steps = conversion.take_steps("eval_steps", trainer["log_every_n_steps"])
    if strategy == "no":
        return
    data |= {"validation_data": data["data"], "validation_split": split}
    if strategy == "steps" and updates_per_epoch is None:
        trainer |= {"val_check_interval": steps * trainer["accumulate_grad_batches"], "check_val_every_n_epoch": None}
    elif strategy == "steps" and updates_per_epoch is not None:
        trainer["check_val_every_n_epoch"] = max(round(steps / updates_per_epoch), 1)
    elif updates_per_epoch is not None:
        conversion.differ(f"eval_strategy={strategy!r}", "an epoch is an iteration here: give eval_steps")


def convert_batches(conversion: Conversion) -> None:
    """Examples of a step, and the length of the run."""
    take, trainer = conversion.take, conversion.trainer
    conversion.data["micro_batch_size"] = take("per_device_train_batch_size", 8)
    trainer["accumulate_grad_batches"] = take("gradient_accumulation_steps", 1)
    steps, epochs = take("max_steps", -1), take("num_train_epochs", 3.0)
    if steps > 0:
        trainer |= {"max_steps": steps, "max_epochs": -1}
    elif float(epochs).is_integer():
        trainer["max_epochs"] = int(epochs)
    else:
        conversion.differ(f"num_train_epochs={epochs}", "whole epochs, or give max_steps")
    length = take("max_length", 1024)
    conversion.data["max_length"] = length
    if take("truncation_mode", "keep_start") != "keep_start":
        conversion.differ("truncation_mode", "the beginning is kept")
    convert_validation(conversion)


def convert_sft(conversion: Conversion) -> tuple[str, str]:
    """SFT: the names of module and DataModule."""
    take = conversion.take
    loss = take("loss_type", "nll")
    if loss not in ("nll", "chunked_nll", "dft"):
        conversion.differ(f"loss_type={loss!r}", "one of nll, dft is converted")
    if (text := take("dataset_text_field", "text")) != "text":
        conversion.data["text"] = text
    take("shuffle_dataset")  # TRL's sampler shuffles whatever it says, as ours does
    conversion.notes.append("of conversations (messages) the assistant's turns are learned, in TRL by default all")
    if take("packing", False):
        tokens = conversion.data["micro_batch_size"] * conversion.data["max_length"]
        del conversion.data["micro_batch_size"]
        conversion.data["max_tokens_per_micro_batch"] = tokens
        conversion.differ("packing", "other examples share a row: both fill it with the best fit, of other examples")
    take("packing_strategy")
    conversion.refuse(
        {
            "completion_only_loss": "the columns say it: prompt and completion, or text",
            "assistant_only_loss": "conversations are learned so; without it TRL learns all turns",
        },
        unless={"assistant_only_loss": False},
    )
    if (noise := take("neftune_noise_alpha")) is not None:
        conversion.model["neftune_alpha"] = noise
    if take("disable_dropout", False):
        conversion.differ("disable_dropout", "SFT keeps the model's dropout")
    return ("rlhfkit.DFTModule" if loss == "dft" else "rlhfkit.SFTModule"), "rlhfkit.SFTDataModule"


def convert_reward(conversion: Conversion) -> tuple[str, str]:
    """A reward model of pairs: the names of module and DataModule."""
    conversion.model["centering"] = conversion.take("center_rewards_coefficient", 0.0)
    conversion.data["overlong"] = "drop"  # TRL leaves longer pairs out
    conversion.take("disable_dropout", True)
    return "rlhfkit.RewardModule", "rlhfkit.PreferenceDataModule"


def convert_dpo(conversion: Conversion) -> tuple[str, str]:
    """DPO and its relatives: the names of module and DataModule."""
    take, model = conversion.take, conversion.model
    losses, weights = take("loss_type", ["sigmoid"]), take("loss_weights")
    losses = [losses] if isinstance(losses, str) else list(losses)
    model["loss_type"] = (
        losses[0] if len(losses) == 1 else dict(zip(losses, weights or [1.0] * len(losses), strict=True))
    )
    model |= {"beta": take("beta", 0.1), "label_smoothing": take("label_smoothing", 0.0)}
    if (divergence := take("f_divergence_type", "reverse_kl")) != "reverse_kl":
        names = {"forward_kl": "forward_kl", "js_divergence": "js", "alpha_divergence": "alpha"}
        model["divergence"] = names.get(divergence, divergence)
        model["divergence_alpha"] = take("f_alpha_divergence_coef", 0.5)
    take("f_alpha_divergence_coef")
    if (temperature := take("discopop_tau", 0.05)) != 0.05:
        model["discopop_temperature"] = temperature
    if (alpha := take("ld_alpha")) is not None:
        model["ld_alpha"] = alpha
    if take("use_weighting", False):
        model["use_weighting"] = True
    _convert_reference(conversion)
    return "rlhfkit.DPOModule", "rlhfkit.PreferenceDataModule"


def convert_kto(conversion: Conversion) -> tuple[str, str]:
    """KTO: the names of module and DataModule."""
    take, model = conversion.take, conversion.model
    model |= {
        "loss_type": take("loss_type", "kto"),
        "beta": take("beta", 0.1),
        "desirable_weight": take("desirable_weight", 1.0),
        "undesirable_weight": take("undesirable_weight", 1.0),
    }
    _convert_reference(conversion)
    return "rlhfkit.KTOModule", "rlhfkit.UnpairedPreferenceDataModule"


def _convert_reference(conversion: Conversion) -> None:
    take, model = conversion.take, conversion.model
    if take("precompute_ref_log_probs", False):
        model["precompute_ref_log_probs"] = True
    convert_moving_reference(conversion)
    if not take("disable_dropout", True):
        conversion.differ("disable_dropout=False", "dropout would differ between policy and reference; it is off here")


def convert_moving_reference(conversion: Conversion) -> None:
    """A reference that follows the policy."""
    take = conversion.take
    share, steps = take("ref_model_mixup_alpha", 0.6), take("ref_model_sync_steps", 512)
    if take("sync_ref_model", False):
        conversion.model |= {"ref_model_mixup_alpha": share, "ref_model_sync_steps": steps}


SUPERVISED: Mapping[str, Callable[[Conversion], tuple[str, str]]] = {
    "sft": convert_sft,
    "reward": convert_reward,
    "dpo": convert_dpo,
    "kto": convert_kto,
}
"""The part of each trainer that learns from given answers."""
