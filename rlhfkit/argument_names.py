"""Arguments that a class does not take: the error names the nearest one, and what other libraries' names are here.

Imports the standard library only.
"""

import difflib
import inspect
import re
from abc import ABCMeta
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("lr",),
    "beta": ("kl_coef",),
    "init_kl_coef": ("kl_coef",),
    "epsilon": ("clip_low",),
    "cliprange": ("clip_low",),
    "clip_range": ("clip_low",),
    "eps_clip": ("clip_low",),
    "epsilon_high": ("clip_high",),
    "delta": ("policy_loss_arguments",),
    "num_iterations": ("PromptDataModule(epochs_per_iteration=)",),
    "num_ppo_epochs": ("PromptDataModule(epochs_per_iteration=)",),
    "steps_per_generation": ("PromptDataModule(updates_per_iteration=)",),
    "generation_batch_size": ("PromptDataModule(rollout_batch_size=)",),
    "train_batch_size": ("PromptDataModule(rollout_batch_size=)",),
    "per_device_train_batch_size": ("micro_batch_size", "SFTDataModule(micro_batch_size=)"),
    "per_device_eval_batch_size": ("validation_batch_size", "PromptDataModule(validation_batch_size=)"),
    "gradient_accumulation_steps": ("Trainer(accumulate_grad_batches=)",),
    "num_train_epochs": ("Trainer(max_epochs=)",),
    "max_steps": ("Trainer(max_steps=)",),
    "max_grad_norm": ("Trainer(gradient_clip_val=)",),
    "logging_steps": ("Trainer(log_every_n_steps=)",),
    "eval_steps": ("Trainer(val_check_interval=)",),
    "save_steps": ("Trainer(callbacks=)",),
    "output_dir": ("Trainer(default_root_dir=)",),
    "report_to": ("Trainer(logger=)",),
    "bf16": ("Trainer(precision=)",),
    "fp16": ("Trainer(precision=)",),
    "dtype": ("Trainer(precision=)",),
    "torch_dtype": ("Trainer(precision=)",),
    "deepspeed": ("RLHFDeepSpeedStrategy(stage=)",),
    "model_name_or_path": ("model",),
    "attn_implementation": ("attention", "ModelLoading(attention=)"),
    "adam_beta1": ("optimization=Optimization(betas=)",),
    "adam_beta2": ("optimization=Optimization(betas=)",),
    "weight_decay": ("optimization=Optimization(weight_decay=)",),
    "optim": ("optimization=Optimization(optimizer=)",),
    "lr_scheduler_type": ("optimization=Optimization(lr_schedule=)",),
    "lr_schedule": ("optimization=Optimization(lr_schedule=)",),
    "warmup_steps": ("optimization=Optimization(warmup_steps=)",),
    "warmup_ratio": ("optimization=Optimization(warmup_ratio=)",),
    "gradient_checkpointing": ("loading=ModelLoading(gradient_checkpointing=)",),
    "router_aux_loss_coef": ("parts=[RouterLoss(coef=)]",),
    "use_liger_kernel": ("liger_kernels", "ModelLoading(liger_kernels=)"),
    "activation_offloading": ("offload_activations", "ModelLoading(offload_activations=)"),
    "trust_remote_code": ("ModelLoading(trust_remote_code=)",),
    "use_peft": ("lora",),
    "peft_config": ("lora",),
    "lora_r": ("LoRA(rank=)",),
    "r": ("rank",),
    "lora_alpha": ("alpha", "LoRA(alpha=)"),
    "lora_dropout": ("dropout", "LoRA(dropout=)"),
    "lora_target_modules": ("targets", "LoRA(targets=)"),
    "target_modules": ("targets",),
    "use_rslora": ("rslora",),
    "use_dora": ("dora",),
    "load_in_4bit": ("ModelLoading(quantization=)",),
    "num_generations": ("group_size", "SamplingSpec(group_size=)"),
    "max_completion_length": ("max_new_tokens", "SamplingSpec(max_new_tokens=)"),
    "max_tokens": ("max_new_tokens",),
    "temperature": ("SamplingSpec(temperature=)",),
    "top_p": ("SamplingSpec(top_p=)",),
    "top_k": ("SamplingSpec(top_k=)",),
    "use_vllm": ("engine", "RolloutCallback(engine=)"),
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization", "VLLMPool(gpu_memory_utilization=)"),
    "vllm_tensor_parallel_size": ("tensor_parallel_size", "VLLMPool(tensor_parallel_size=)"),
    "reward_funcs": ("reward", "RolloutCallback(reward=)"),
    "reward_weights": ("WeightedSum(parts=)",),
    "scale_rewards": ("advantage_scale",),
    "mask_truncated_completions": ("parts=[MaskTruncated()]",),
    "entropy_coef": ("parts=[EntropyBonus(coef=)]",),
    "train_dataset": ("data", "SFTDataModule(data=)"),
    "dataset_name": ("data", "SFTDataModule(data=)"),
    "eval_dataset": ("validation_data", "SFTDataModule(validation_data=)"),
    "processing_class": ("tokenizer", "SFTDataModule(tokenizer=)"),
    "f_divergence_type": ("divergence",),
    "f_alpha_divergence_coef": ("divergence=AlphaDivergence(alpha=)",),
    "discopop_tau": ("loss_type=DiscoPOP(temperature=)",),
    "ref_model": ("ref_model", "parts=[Reference(pool=)]"),
    "neftune_noise_alpha": ("parts=[NEFTune(alpha=)]",),
    "ref_model_sync_steps": ("parts=[MovingReference(steps=)]",),
    "ptx_coef": ("parts=[PretrainingLoss(coef=)]",),
    "ref_model_mixup_alpha": ("parts=[MovingReference(alpha=)]",),
    "vf_coef": ("parts=[ValueLoss(coef=)]",),
    "cliprange_value": ("parts=[ValueLoss(clip=)]",),
    "gae_lambda": ("lam",),
    "lambd": ("lam",),
    "n_samples_per_prompt": ("group_size", "SamplingSpec(group_size=)"),
    "actor_learning_rate": ("lr",),
    "critic_learning_rate": ("critic_lr",),
    "clip_ratio": ("clip_low",),
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "kl_loss_coef": ("kl_coef",),
    "ppo_epochs": ("PromptDataModule(epochs_per_iteration=)",),
    "ppo_micro_batch_size_per_gpu": ("micro_batch_size", "PromptDataModule(micro_batch_size=)"),
    "loss_type": ("policy_loss",),
    "importance_sampling_level": ("policy_loss",),
    "loss_agg_mode": ("aggregation",),
    "advantage_estimator": ("preset",),
    "adv_estimator": ("preset",),
    "norm_adv_by_std_in_grpo": ("advantage_scale",),
    "use_kl_loss": ("kl_coef",),
    "rpo_alpha": ("nll_coef",),
    "top_entropy_quantile": ("parts=[TopEntropy(fraction=)]",),
    "max_length": ("max_new_tokens", "SFTDataModule(max_length=)"),
    "max_seq_length": ("max_length", "SFTDataModule(max_length=)"),
    "max_prompt_length": ("PromptDataModule(max_prompt_length=)",),
    "prompt_max_len": ("PromptDataModule(max_prompt_length=)",),
    "dataset_text_field": ("text", "SFTDataModule(text=)"),
    "completion_only_loss": ("SFTDataModule(completion=)",),
    "assistant_only_loss": ("SFTDataModule(messages=)",),
    "dataset_num_proc": ("num_proc", "SFTDataModule(num_proc=)"),
    "prompt_key": ("prompt", "PromptDataModule(prompt=)"),
    "input_key": ("prompt", "PromptDataModule(prompt=)"),
    "label_key": ("answer", "PromptDataModule(answer=)"),
    "dataset_config": ("subset", "PromptDataModule(subset=)"),
    "tokenizer": ("SFTDataModule(tokenizer=)",),
    "ppo_mini_batch_size": ("PromptDataModule(updates_per_iteration=)",),
    "num_mini_batches": ("PromptDataModule(updates_per_iteration=)",),
    "micro_train_batch_size": ("micro_batch_size", "PromptDataModule(micro_batch_size=)"),
    "micro_rollout_batch_size": ("ModelLoading(max_tokens_per_forward=)",),
    "group_size": ("SamplingSpec(group_size=)",),
    "n": ("group_size",),
    "max_new_tokens": ("SamplingSpec(max_new_tokens=)",),
    "response_length": ("max_new_tokens", "SamplingSpec(max_new_tokens=)"),
    "max_response_length": ("max_new_tokens", "SamplingSpec(max_new_tokens=)"),
    "generate_max_len": ("max_new_tokens", "SamplingSpec(max_new_tokens=)"),
    "stop_strings": ("stop",),
    "vllm_mode": ("VLLMPool(colocate=)",),
    "vllm_num_engines": ("num_engines", "VLLMPool(num_engines=)"),
    "enforce_eager": ("VLLMPool(engine_arguments=)",),
    "max_num_seqs": ("VLLMPool(engine_arguments=)",),
    "enable_prefix_caching": ("VLLMPool(engine_arguments=)",),
    "reward_fn": ("reward", "RolloutCallback(reward=)"),
    "reward_model": ("parts=[RewardModel(models=)]",),
    "dynamic_sampling": ("parts=[DynamicSampling()]",),
    "log_completions": ("Trainer(callbacks=)",),
    "zero_stage": ("RLHFDeepSpeedStrategy(stage=)",),
    "grad_clip": ("Trainer(gradient_clip_val=)",),
}
"""What the options of TRL and others that most people use are called here, the first that a class takes being meant;
``Class(argument=)`` is an argument of another class. docs/coming_from.md explains them."""


T = TypeVar("T")


class AnswersNames(ABCMeta):
    """Metaclass of classes that answer an argument they do not take with what it probably stands for."""

    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        """Make an object.

        Raises:
            TypeError: If there is no such argument; names the class that was called, not the base that found it.
        """
        try:
            return type.__call__(cls, *args, **kwargs)  # type: ignore[no-any-return]
        except TypeError as error:
            found = re.match(r"(\S+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in (kind.__qualname__ for kind in cls.__mro__):
                raise
            guess = hint(found[2], constructor_arguments(cls))
            why = f"{cls.__name__} takes no argument {found[2]}" + (f": {guess}" if guess else "")
            raise TypeError(why) from None

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor, for ``help()``, which would show that of ``__call__``."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def constructor_arguments(owner: type) -> list[str]:
    """Names of the arguments of a constructor and of those that its ``**kwargs`` go to."""
    found: list[str] = []
    for kind in owner.__mro__:
        if "__init__" in vars(kind):
            own = [*inspect.signature(vars(kind)["__init__"]).parameters.values()][1:]
            found += [one.name for one in own if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
            if not any(one.kind is one.VAR_KEYWORD for one in own):
                break
    return found


def hint(name: str, known: Iterable[str]) -> str:
    """Return what a name that is not among the known ones probably stands for, as a sentence; empty without a guess."""
    known = list(known)
    others = OTHER_NAMES.get(name, ())
    same = next((one for other in others if (one := other.rpartition("(")[2].removesuffix("=)")) in known), None)
    if same:
        return f"did you mean {same}? {name} is {same} here"
    elsewhere = [one for one in others if "(" in one]
    near = elsewhere or difflib.get_close_matches(name, known, n=1, cutoff=0.72)
    return f"did you mean {near[0]}?" if near else ""
