"""From what a user has (module, data, callback, strategy) to a :class:`~rlhfkit.costs.run.Run`.

Sizes that only the data knows (tokens of a prompt, of an answer) are taken at their limits unless they are given, and
every such choice is noted, so that a report can state it.
"""

import dataclasses
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import lightning as L
from lightning.pytorch.strategies import Strategy

from rlhfkit.callbacks import RolloutCallback
from rlhfkit.costs.described_roles import model_roles, sharding_of
from rlhfkit.costs.hardware import GIB, GPU, Efficiency
from rlhfkit.costs.model_shape import ModelShape
from rlhfkit.costs.run import EngineShape, Precision, Run, Sharding
from rlhfkit.data.packing import capped_iteration_shape, iteration_shape
from rlhfkit.datamodules import PreferenceDataModule, PromptDataModule, SFTDataModule
from rlhfkit.models.attention.packed import PACKED_ATTENTION, PACKED_ATTENTIONS
from rlhfkit.modules import (
    OnPolicyModule,
    PolicyModule,
    ProcessRewardModule,
    RewardModule,
    SFTModule,
)
from rlhfkit.modules.optimizers.factories import state_bytes
from rlhfkit.rewards.models import ModelReward
from rlhfkit.rollout import LocalEngine, RolloutEngine, VLLMPool
from rlhfkit.rollout.wrappers.engine_wrapper import EngineWrapper
from rlhfkit.rollout.wrappers.reference_samples import OtherSamples
from rlhfkit.strategies import RLHFDeepSpeedStrategy

PROMPT_TOKENS = 512
"""Assumed tokens of a prompt where neither an argument nor the data's ``max_prompt_length`` says it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of prompts and answers, as far as they are known."""

    prompt_tokens: float | None = None
    answer_tokens: float | None = None
    answer_spread: float | None = None


def described_run(
    module: PolicyModule | Mapping[str, Any] | str,
    data: L.LightningDataModule | None,
    rollouts: RolloutCallback | None,
    *,
    strategy: str | Strategy,
    devices: int,
    num_nodes: int,
    precision: str | int,
    accumulate_grad_batches: int,
    gpu: GPU,
    lengths: Lengths,
    score_seconds: float,
    efficiency: Efficiency,
    gpus_per_machine: int,
) -> tuple[Run, list[str], list[str]]:
    """Describe a run; returns it, the assumptions that were made, and sizes that contradict one another.

    Raises:
        TypeError: If the module is none of rlhfkit's.
        ValueError: If the strategy is unknown, or prompts are trained on without a callback that samples.
    """
    policy = made_module(module)
    sharding = sharding_of(strategy, devices * num_nodes)
    assumptions: list[str] = []
    problems: list[str] = []
    used_precision = Precision.of(precision, deepspeed=sharding.stage is not None)
    # Lightning's gradient scaler takes no fused kernels.
    fused = gpu.name != "cpu" and (sharding.stage is not None or str(precision) != "16-mixed")
    fields = model_roles(policy, used_precision, fused=fused)
    state = state_bytes(
        policy.optimizer_function,
        policy.optimizer_arguments,
        itemsize=4 if fields["policy"].adapters else used_precision.main_weights,
        fused=fused,
    )
    if state is None:
        assumptions.append(f"optimizer={policy.optimizer_name!r} keeps two moments per parameter, as AdamW does")
    assumptions += _not_counted(policy, data, rollouts, strategy)
    fields |= {
        "gpu": gpu,
        "sharding": sharding,
        "precision": used_precision,
        "optimizer_state": state,
        "gradient_checkpointing": policy.gradient_checkpointing,
        "offload_activations": policy.offload_activations,
        "tiled_mlp": policy.tiled_mlp,
        "attention": "packed" if policy.attention in (None, PACKED_ATTENTION, *PACKED_ATTENTIONS) else policy.attention,
        "score_seconds": score_seconds,
        "efficiency": efficiency,
        "gpus_per_machine": gpus_per_machine,
    }
    if isinstance(policy, OnPolicyModule) or rollouts is not None:
        if not isinstance(data, PromptDataModule) or rollouts is None:
            raise ValueError(
                f"{type(policy).__name__} learns from its own samples: give estimate(data=PromptDataModule(...), "
                "rollouts=RolloutCallback(...)), which say how many there are and how they are made"
            )
        fields |= _sampling(data, rollouts, sharding, accumulate_grad_batches, problems)
        fields |= _answers(data, rollouts, lengths, assumptions)
        offload = rollouts.phases.offload_training
        fields["offload_training"] = rollouts.engine.colocate and gpu.name != "cpu" if offload is None else offload
        fields["engine"] = engine_shape(rollouts.engine, used_precision, gpu, sharding.ranks, assumptions)
        if fields["engine"] is not None and fields["engine"].shares_weights and _copied(fields):
            fields["engine"] = dataclasses.replace(fields["engine"], shares_weights=False)
        run = Run(**_with_micro_batches(fields, data, problems))
    else:
        run = Run(**fields, **_offline(policy, data, lengths, sharding, accumulate_grad_batches, assumptions, problems))
    if sharding.tensor > 1 and sharding.stage == 0 and fields["precision"].compute < 4:
        problems.append("tensor_parallel_size > 1 at stage 0 is not supported in 16 bits: use stage 1, 2 or 3")
    if sharding.group > 1 and fields["attention"] != "packed":
        problems.append(
            f"attention={policy.attention!r} is not supported where several ranks compute a forward pass together: "
            "leave it out, and tokens are packed"
        )
    if run.policy.uncertainty > ModelShape.uncertainty:
        assumptions.append(
            f"the layers of the family {run.policy.family!r} are not those that the formulas describe: activations and "
            f"cache may be off by {run.policy.uncertainty:.0%}"
        )
    return run, assumptions, problems


def _not_counted(
    module: PolicyModule, data: L.LightningDataModule | None, rollouts: RolloutCallback | None, strategy: str | Strategy
) -> list[str]:
    """What takes memory or time, or saves it, and is in no formula."""
    found = []
    if isinstance(strategy, RLHFDeepSpeedStrategy) and strategy.engine_configs:
        found.append(f"engine_configs of {', '.join(strategy.engine_configs)} change nothing")
    if module.liger_kernels:
        found.append("liger_kernels save no memory")
    if rollouts is not None and isinstance(rollouts.reward, ModelReward):
        found.append(
            f"the model of the reward ({rollouts.reward.model}) takes no GPU memory and no time: reward_model of the "
            "module is counted"
        )
    if isinstance(data, PromptDataModule) and data.pretraining_data is not None:
        found.append("pretraining_data takes no memory and no time")
    return found


# ------------------------------------------------------------------------------------------------ the module


def made_module(module: PolicyModule | Mapping[str, Any] | str) -> PolicyModule:
    """The module itself, one made from ``class_path`` and ``init_args`` of a configuration, or SFT of a model's name.

    Raises:
        TypeError: If it is no :class:`~rlhfkit.PolicyModule`.
        ValueError: If a mapping has no ``class_path``.
    """
    if isinstance(module, str):
        return SFTModule(module)
    if isinstance(module, Mapping):
        path = module.get("class_path")
        if not isinstance(path, str):
            raise ValueError(
                "a module as a mapping needs class_path and init_args, as in a configuration file, got the keys "
                f"{', '.join(map(str, module)) or 'none'}"
            )
        module = resolve_name(path if "." in path else f"rlhfkit.{path}")(**module.get("init_args", {}))
    if not isinstance(module, PolicyModule):
        raise TypeError(f"module must be one of rlhfkit's modules or the name of a model, got {type(module).__name__}")
    return module


# ------------------------------------------------------------------------------------------------ data and engines


def _sampling(
    data: PromptDataModule, rollouts: RolloutCallback, sharding: Sharding, accumulate: int, problems: list[str]
) -> dict[str, Any]:
    """Sizes of an iteration. Ranks of a forward group share micro-batches."""
    group, prompts, cap = rollouts.sampling.group_size, data.rollout_batch_size, data.max_tokens_per_micro_batch
    sequences, ranks = prompts * group, (sharding.ranks, sharding.group)
    updates = data.updates_per_iteration
    if cap is None:
        updates = max(1, round(sequences / (data.micro_batch_size * accumulate * sharding.data)))
    try:
        if cap is None:
            updates = iteration_shape(prompts, group, data.micro_batch_size, accumulate, *ranks).updates
        else:
            capped_iteration_shape(prompts, group, updates, *ranks)
    except ValueError as error:
        problems.append(str(error))
    epochs = data.epochs_per_iteration
    return {
        "sequences": sequences,
        "group_size": group,
        "updates": updates * epochs,
        "passes": epochs,
        "max_staleness": rollouts.max_staleness,
    }


def _answers(
    data: PromptDataModule, rollouts: RolloutCallback, lengths: Lengths, assumptions: list[str]
) -> dict[str, Any]:
    """Tokens of prompts and answers."""
    limit, prompt, answer = rollouts.sampling.max_new_tokens, lengths.prompt_tokens, lengths.answer_tokens
    if prompt is None:
        prompt = data.max_prompt_length or PROMPT_TOKENS
        source = "the data's max_prompt_length" if data.max_prompt_length else "an assumption: give prompt_tokens"
        assumptions.append(f"prompts have {prompt} tokens ({source})")
    spread = lengths.answer_spread
    if answer is None:
        answer = float(limit)
        spread = spread or 0.0
        assumptions.append(f"every answer has {limit} tokens, the limit: give answer_tokens for their mean")
    return {
        "prompt_tokens": float(prompt),
        "answer_tokens": min(float(answer), float(limit)),
        "max_answer_tokens": limit,
        "answer_spread": Run.answer_spread if spread is None else spread,
    }


def _with_micro_batches(fields: dict[str, Any], data: PromptDataModule, problems: list[str]) -> dict[str, Any]:
    """Add the tokens of a micro-batch, and the share of them that is trained on."""
    cap = data.max_tokens_per_micro_batch
    fields = fields | {"micro_batch_sequences": data.micro_batch_size if cap is None else None}
    probe = Run(**fields)
    tokens = (
        data.micro_batch_size * probe.tokens / probe.sequences if cap is None else float(cap * probe.sharding.sequence)
    )
    tokens = max(tokens, probe.longest)  # a sequence is never divided
    trained = probe.sequences * probe.answer_tokens / probe.tokens
    context = probe.policy.context
    if context is not None and probe.longest > context:
        problems.append(
            f"a prompt of {probe.prompt_tokens:,.0f} tokens and an answer of {probe.max_answer_tokens:,} exceed the "
            f"model's context of {context:,}: lower max_new_tokens or max_prompt_length"
        )
    return fields | {"micro_batch_tokens": tokens, "trained_share": min(trained, 1.0)}


def _offline(
    module: PolicyModule,
    data: L.LightningDataModule | None,
    lengths: Lengths,
    sharding: Sharding,
    accumulate: int,
    assumptions: list[str],
    problems: list[str],
) -> dict[str, Any]:
    """Sizes of one optimizer step on given data; each row at its greatest length unless lengths are given."""
    size, limit, cap, together = 8, None, None, 1
    if isinstance(data, SFTDataModule):
        size, limit, cap = data.micro_batch_size, data.max_length, data.max_tokens_per_micro_batch
        if cap is not None and cap * sharding.sequence < limit:
            problems.append(
                f"max_tokens_per_micro_batch={cap} times sequence_parallel_size={sharding.sequence} is less than "
                f"max_length={limit}: raise one of the first two, or lower the last"
            )
    else:
        cure = "give data" if data is None else f"the sizes of a {type(data).__name__} are not known"
        assumptions.append(f"a micro-batch has {size} rows: {cure}")
    if isinstance(data, PreferenceDataModule):
        together = 2
    length = None
    if lengths.prompt_tokens is not None or lengths.answer_tokens is not None:
        length = (lengths.prompt_tokens or 0.0) + (lengths.answer_tokens or 0.0)
    if length is None:
        length = float(limit or PROMPT_TOKENS)
        source = "max_length of the data" if limit else "an assumption: give answer_tokens"
        assumptions.append(f"every row has {length:.0f} tokens ({source})")
    tokens = float(cap * sharding.sequence) if cap is not None else size * together * length
    tokens = max(tokens, together * length)  # a sequence is never divided over micro-batches
    scalar = isinstance(module, RewardModule | ProcessRewardModule)
    trained = 1.0 if lengths.answer_tokens is None else lengths.answer_tokens / length
    return {
        "sequences": max(1, round(sharding.data * accumulate * tokens / length)),
        "sequences_together": together,
        "prompt_tokens": length,
        "answer_tokens": 0.0,
        "micro_batch_tokens": tokens,
        "trained_share": 0.0 if scalar else trained,
    }


def _copied(fields: Mapping[str, Any]) -> bool:
    """Whether the policy's weights are not what a ``LocalEngine`` computes with, or not there while it does."""
    policy, sharding, precision = fields["policy"], fields["sharding"], fields["precision"]
    changed = policy.adapters or policy.quantized or precision.weights != precision.compute
    elsewhere = sharding.stage == 3 or sharding.tensor > 1 or fields["offload_training"] or fields["max_staleness"]
    return bool(changed or elsewhere)


def engine_shape(
    engine: RolloutEngine, precision: Precision, gpu: GPU, ranks: int, assumptions: list[str]
) -> EngineShape | None:
    """Describe an engine; ``None`` for those that need no GPU (a replay)."""
    while isinstance(engine, EngineWrapper):
        if isinstance(engine, OtherSamples):
            assumptions.append(f"the reference's own copy in {type(engine).__name__} is not counted")
        engine = engine.engine
    if isinstance(engine, LocalEngine):
        return EngineShape(
            count=ranks,
            itemsize=precision.compute,
            local=True,
            shares_weights=engine.share_weights is not False,
            max_sequences=engine.max_sequences,
        )
    if not isinstance(engine, VLLMPool):
        assumptions.append(f"{type(engine).__name__} takes no GPU memory and no time")
        return None
    sizes = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
    more = engine.engine_arguments
    large = gpu.memory >= 70 * GIB and "a100" not in gpu.name.lower()  # vLLM 0.32's defaults depend on it
    of_cache = str(more.get("kv_cache_dtype", "auto"))
    return EngineShape(
        count=engine.num_engines,
        tensor_parallel=engine.parallelism.tensor,
        pipeline_parallel=engine.parallelism.pipeline,
        data_parallel=engine.parallelism.data,
        memory_share=engine.gpu_memory_utilization,
        cache_bytes=None if engine.kv_cache_gib is None else engine.kv_cache_gib * GIB,
        itemsize=sizes.get(str(engine.dtype), precision.compute),
        quantized=engine.quantized,
        cache_itemsize=1 if of_cache.startswith("fp8") else sizes.get(of_cache),
        takes_adapter=engine.lora != "merge" and not engine.colocate,
        colocated=engine.colocate,
        sleeping_weights_on_host=engine.colocate and engine.sleep_level == 1,
        max_sequences=int(more.get("max_num_seqs") or (1024 if large else 256)),
        prefill_tokens=int(more.get("max_num_batched_tokens") or (16384 if large else 8192)),
    )
