"""From what a user has (module, data, callback, strategy) to a :class:`~rlhfkit.costs.run.Run`.

Sizes that only the data knows (tokens of a prompt, of an answer) are taken at their limits unless they are given, and
every such choice is noted, so that a report can state it.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import lightning as L
from lightning.pytorch.strategies import Strategy, StrategyRegistry

from rlhfkit import modules
from rlhfkit.callbacks import RolloutCallback
from rlhfkit.costs.model_shape import ModelShape, model_shape
from rlhfkit.costs.run import GIB, GPU, EngineShape, PlacedModel, Precision, Run, Sharding
from rlhfkit.data.packing import capped_iteration_shape, iteration_shape
from rlhfkit.datamodules import PreferenceDataModule, PromptDataModule, SFTDataModule
from rlhfkit.models.attention.packed import PACKED_ATTENTION, PACKED_ATTENTIONS
from rlhfkit.models.load import base_model_name
from rlhfkit.modules.optimizers.factories import state_bytes
from rlhfkit.parts import model_elsewhere
from rlhfkit.roles import CriticPool, ModelPool
from rlhfkit.rollout import LocalEngine, RolloutEngine, VLLMPool
from rlhfkit.rollout.errors import EngineError
from rlhfkit.strategies import RLHFDeepSpeedStrategy, SequenceParallelDDPStrategy
from rlhfkit.strategies.strategy import register

PROMPT_TOKENS = 512
"""Assumed tokens of a prompt where neither an argument nor the data's ``max_prompt_length`` says it."""
_PLAIN = ("auto", "ddp", "single_device")


@dataclass
class RunDescription:
    """What a run is made of, and what was noted while it was described."""

    module: modules.PolicyModule
    data: L.LightningDataModule | None
    rollouts: RolloutCallback | None
    sharding: Sharding
    accumulate_grad_batches: int
    prompt_tokens: float | None
    """Mean of a prompt; ``None``: not given."""
    answer_tokens: float | None
    """Mean of an answer; ``None``: not given."""
    assumptions: list[str] = field(default_factory=list)
    """Sizes that were not given."""
    problems: list[str] = field(default_factory=list)
    """Sizes that contradict one another."""

    def run(self, gpu: GPU, precision: str | int) -> Run:
        """The run as plain values.

        Raises:
            ValueError: If prompts are trained on without a callback that samples.
        """
        policy, sharding, rollouts = self.module, self.sharding, self.rollouts
        types = Precision.of(precision, deepspeed=sharding.stage is not None)
        # Lightning's gradient scaler takes no fused kernels.
        fused = gpu.name != "cpu" and (sharding.stage is not None or str(precision) != "16-mixed")
        fields = model_roles(policy)
        shape: ModelShape = fields["policy"]
        chosen, itemsize = policy.optimization, 4 if shape.adapters else types.main_weights
        state = state_bytes(chosen.function, chosen.optimizer_arguments or {}, itemsize=itemsize, fused=fused)
        fields |= {
            "gpu": gpu,
            "sharding": sharding,
            "precision": types,
            "optimizer_state": state,
            "gradient_checkpointing": policy.loading.gradient_checkpointing,
            "offload_activations": policy.loading.offload_activations,
            "tiled_mlp": policy.loading.tiled_mlp,
            "attention": "packed" if packed_rows(policy) else policy.loading.attention,
        }
        if state is None:
            self.assumptions.append(f"optimizer={chosen.name!r} keeps two moments per parameter, as AdamW does")
        if not shape.usual:
            self.assumptions.append(
                f"the layers of the family {shape.family!r} are not those that the formulas describe: activations and "
                "cache may be off by 50%"
            )
        if not isinstance(policy, modules.OnPolicyModule) and rollouts is None:
            return Run(**fields, **self._given_data())
        if not isinstance(self.data, PromptDataModule) or rollouts is None:
            raise ValueError(
                f"{type(policy).__name__} learns from its own samples: give estimate(data=PromptDataModule(...), "
                "rollouts=RolloutCallback(...)), which say how many there are and how they are made"
            )
        fields |= self._sampled(self.data, rollouts)
        from rlhfkit.callbacks.rollout.parts.shared_devices import SharedDevices

        devices = rollouts.part(SharedDevices)
        if devices is not None:
            offload = devices.offload_training
            fields["offload_training"] = devices.colocate and gpu.name != "cpu" if offload is None else offload
        if rollouts.groups is not None and rollouts.groups.function.engines:
            self.assumptions.append(f"the engines of {type(rollouts.groups.function).__name__} are not counted")
        run = Run(**fields)
        run = replace(run, engine=self._engine(rollouts.engine, run))
        if shape.context is not None and run.longest > shape.context:
            self.problems.append(
                f"a prompt of {run.prompt_tokens:,.0f} tokens and an answer of {run.max_answer_tokens:,} exceed the "
                f"model's context of {shape.context:,}: lower max_new_tokens or max_prompt_length"
            )
        return run

    def _sampled(self, data: PromptDataModule, rollouts: RolloutCallback) -> dict[str, Any]:
        """Sizes of an iteration. Ranks that compute forward passes together share micro-batches."""
        group, prompts, cap = rollouts.sampling.group_size, data.rollout_batch_size, data.max_tokens_per_micro_batch
        ranks, limit = (self.sharding.ranks, self.sharding.group), rollouts.sampling.max_new_tokens
        prompt = self.prompt_tokens
        if prompt is None:
            prompt = data.max_prompt_length or PROMPT_TOKENS
            source = "the data's max_prompt_length" if data.max_prompt_length else "an assumption: give prompt_tokens"
            self.assumptions.append(f"prompts have {prompt} tokens ({source})")
        if self.answer_tokens is None:
            self.assumptions.append(f"every answer has {limit} tokens, the limit: give answer_tokens for their mean")
        answer = min(self.answer_tokens or limit, limit)
        sequences = prompts * group
        together = group if cap is not None else min(group, data.micro_batch_size)
        # A packed row holds the prompt of a group once.
        tokens = answer + prompt / (together if packed_rows(self.module) else 1)
        try:
            if cap is None:
                iteration_shape(prompts, group, data.micro_batch_size, self.accumulate_grad_batches, *ranks)
            else:
                capped_iteration_shape(prompts, group, data.updates_per_iteration, *ranks)
        except ValueError as error:
            self.problems.append(str(error))
        micro_batch = cap * self.sharding.sequence if cap is not None else data.micro_batch_size * tokens
        return {
            "sequences": sequences,
            "group_size": group,
            "prompt_tokens": float(prompt),
            "answer_tokens": float(answer),
            "max_answer_tokens": limit,
            "tokens": sequences * tokens,
            "micro_batch_tokens": float(max(micro_batch, prompt + limit)),  # a sequence is never divided
            "trained_share": min(answer / tokens, 1.0),
            "passes": data.epochs_per_iteration,
            "max_staleness": max((part.staleness or 0 for part in rollouts.parts), default=0),
        }

    def _given_data(self) -> dict[str, Any]:
        """Sizes of one optimizer step on given data; each row at its greatest length unless lengths are given."""
        data, size, limit, cap = self.data, 8, None, None
        if isinstance(data, SFTDataModule):
            size, limit, cap = data.micro_batch_size, data.max_length, data.max_tokens_per_micro_batch
        else:
            cure = "give data" if data is None else f"the sizes of a {type(data).__name__} are not known"
            self.assumptions.append(f"a micro-batch has {size} rows: {cure}")
        together = 2 if isinstance(data, PreferenceDataModule) else 1
        length = (self.prompt_tokens or 0.0) + (self.answer_tokens or 0.0)
        if not length:
            length = float(limit or PROMPT_TOKENS)
            source = "max_length of the data" if limit else "an assumption: give answer_tokens"
            self.assumptions.append(f"every row has {length:.0f} tokens ({source})")
        tokens = float(cap * self.sharding.sequence) if cap is not None else size * together * length
        tokens = max(tokens, together * length)  # a pair is never divided over micro-batches
        scalar = isinstance(self.module, modules.RewardModule | modules.ProcessRewardModule)
        step = self.sharding.data * self.accumulate_grad_batches * tokens
        return {
            "sequences": max(1, round(step / length)),
            "prompt_tokens": length,
            "answer_tokens": 0.0,
            "tokens": step,
            "micro_batch_tokens": tokens,
            "trained_share": 0.0 if scalar else (self.answer_tokens or length) / length,
        }

    def _engine(self, engine: RolloutEngine, run: Run) -> EngineShape | None:
        """Describe the engine of a run; ``None`` for those that need no GPU (a replay)."""
        if isinstance(engine, LocalEngine):
            policy, types, sharding = run.policy, run.precision, run.sharding
            changed = policy.adapters or policy.quantized or types.weights != types.compute
            away = sharding.stage == 3 or sharding.tensor > 1 or run.offload_training or run.max_staleness
            return EngineShape(
                count=sharding.ranks,
                itemsize=types.compute,
                local=True,
                shares_weights=engine.share_weights is not False and not (changed or away),
                max_sequences=engine.max_sequences,
            )
        if not isinstance(engine, VLLMPool):
            self.assumptions.append(f"{type(engine).__name__} takes no GPU memory and no time")
            return None
        try:
            engine.parallelism.check_model(self.module.model_config)
        except EngineError as error:
            self.problems.append(str(error))
        sizes = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
        more = engine.engine_arguments
        large = run.gpu.memory >= 70 * GIB and "a100" not in run.gpu.name.lower()  # vLLM 0.32's defaults depend on it
        return EngineShape(
            count=engine.num_engines,
            tensor_parallel=engine.parallelism.tensor,
            pipeline_parallel=engine.parallelism.pipeline,
            data_parallel=engine.parallelism.data,
            memory_share=engine.gpu_memory_utilization,
            cache_bytes=None if engine.kv_cache_gib is None else engine.kv_cache_gib * GIB,
            itemsize=sizes.get(str(engine.dtype), run.precision.compute),
            quantized=engine.quantized,
            colocated=engine.colocate,
            max_sequences=int(more.get("max_num_seqs") or (1024 if large else 256)),
            prefill_tokens=int(more.get("max_num_batched_tokens") or (16384 if large else 8192)),
        )


# ------------------------------------------------------------------------------------------------ models


def packed_rows(policy: modules.PolicyModule) -> bool:
    """Whether the policy computes rows without padding, if its family can be packed."""
    return policy.loading.attention in (None, PACKED_ATTENTION, *PACKED_ATTENTIONS)


def model_roles(module: modules.PolicyModule) -> dict[str, Any]:
    """Models that the module trains or holds, those that it has elsewhere, and passes of the policy before updates."""

    def shape(name: str, *, trained: bool = False) -> ModelShape:
        loading = module.loading
        own: dict[str, Any] = {"lora": module.lora, "quantization": loading.quantization} if trained else {}
        own |= {"train_vision": loading.train_vision} if trained else {}
        return model_shape(name, **own, trust_remote_code=module.trust_remote_code)

    policy = shape(module.model_name, trained=True)
    frozen: dict[str, ModelShape] = {}
    if isinstance(module, modules.RewardModule | modules.ProcessRewardModule):
        policy = policy.with_scalar_head()
    roles: dict[str, Any] = {"policy": policy, "frozen": frozen, "policy_passes": 0.0}
    if module.has_reference and getattr(module, "ref_model_name", None) is not None:
        frozen["reference"] = shape(cast(Any, module).ref_model_name)
    elif module.needs_reference and policy.adapters:
        roles["policy_passes"] = 1.0  # the policy without its adapters
    elif module.needs_reference:
        frozen["reference"] = shape(module.model_name)
    if (
        isinstance(module, modules.DistillationModule)
        and not module.precompute_teacher
        and module.served_teacher is None
    ):
        frozen["teacher"] = shape(module.teacher_name)
    if isinstance(module, modules.OnPolicyDistillationModule) and module.teacher_part.pool is None:
        names = enumerate(module.teacher_part.names)
        frozen |= {"teacher" + (f" {number}" if number else ""): shape(one) for number, one in names}
    if not isinstance(module, modules.OnPolicyModule):
        return roles
    from rlhfkit.modules.parts.old_policy import OldLogprobs

    before = next((part for part in module.parts if isinstance(part, OldLogprobs)), None)
    every = before is not None and before.of_all_rows
    roles["policy_passes"] += 1.0 if every or not module.hooks["old_logprobs"] else 0.0
    roles["prepare_tokens"] = module.loading.max_tokens_per_forward
    elsewhere: dict[str, Any] = {"reference": model_elsewhere(module.parts, "reference")}
    for name, one in {} if module.scorer is None else module.scorer.by_name.items():
        role = f"reward model {name}".strip()
        if isinstance(one, str):
            frozen[role] = shape(one).with_scalar_head()
        else:
            elsewhere[role] = one
    if isinstance(module, modules.OnPolicyDistillationModule):
        elsewhere["teacher"] = module.teacher_part.pool
    base, critic = base_model_name(module.model_name), None
    if isinstance(module, modules.PPOModule):
        home = module.critic_part.model
        elsewhere["critic"] = home if isinstance(home, ModelPool) else None
        critic = home if isinstance(home, CriticPool) else None
        if not module.critic_part.shared and (home is None or isinstance(home, str)):
            roles["critic"] = shape(home or base, trained=True)
    placed = [_placed(role, pool, shape(pool.model)) for role, pool in elsewhere.items() if isinstance(pool, ModelPool)]
    if critic is not None:
        own = shape(critic.model if isinstance(critic.model, str) else base, trained=True).with_scalar_head()
        strategy = sharding_of(critic.strategy, critic.num_ranks)
        placed.append(PlacedModel(role="critic", shape=own, gpus=critic.num_ranks, sharding=strategy))
    return roles | {"placed": tuple(placed)}


def _placed(role: str, pool: ModelPool, shape: ModelShape) -> PlacedModel:
    """A replica without GPUs among its resources is described as having one."""
    gpus = max(1, math.ceil((pool.resources or {}).get("GPU", 1)))
    shape = shape.with_scalar_head() if role.startswith(("reward model", "critic")) else shape
    return PlacedModel(role=role, shape=shape, replicas=pool.num_replicas, gpus=gpus)


def sharding_of(strategy: str | Strategy, ranks: int) -> Sharding:
    """The sharding of a strategy or of its name.

    Raises:
        ValueError: If it is neither ours nor one of Lightning's that replicate everything, or if its forward groups do
            not divide the ranks.
    """
    register()
    if isinstance(strategy, str) and strategy.startswith("rlhf_") and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    if isinstance(strategy, RLHFDeepSpeedStrategy):
        config: dict[str, Any] = strategy.config if isinstance(strategy.config, dict) else {}
        zero = config.get("zero_optimization") or {}
        live = zero.get("stage3_max_live_parameters", 1e9) + zero.get("stage3_prefetch_bucket_size", 5e7)
        return Sharding(
            ranks=ranks,
            stage=int(zero.get("stage", 0)),
            offload_optimizer=bool(zero.get("offload_optimizer")),
            offload_parameters=bool(zero.get("offload_param")),
            bucket=int(zero.get("reduce_bucket_size", 5e8)),
            live_parameters=int(live),
            sequence=strategy.sequence_parallel_size,
            tensor=strategy.tensor_parallel_size,
        )
    if isinstance(strategy, SequenceParallelDDPStrategy):
        return Sharding(ranks=ranks, sequence=strategy.sequence_parallel_size)
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if name not in (*_PLAIN, "DDPStrategy", "SingleDeviceStrategy"):
        known = [one for one in StrategyRegistry.available_strategies() if one.startswith("rlhf_")]
        raise ValueError(
            f"strategy must be one of {', '.join([*_PLAIN, *known])}, or an RLHFDeepSpeedStrategy, got {name!r}"
        )
    return Sharding(ranks=ranks)
