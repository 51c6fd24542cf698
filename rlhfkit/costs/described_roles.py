"""Which models a module trains or holds, which it has elsewhere, and how strategies shard them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from rlhfkit.costs.model_shape import ModelShape, model_shape
from rlhfkit.costs.run import PlacedModel, PlacedRole, Precision, Sharding
from rlhfkit.models.load import base_model_name
from rlhfkit.modules import (
    DistillationModule,
    OnPolicyDistillationModule,
    OnPolicyModule,
    PolicyModule,
    PPOModule,
    ProcessRewardModule,
    ReferenceModule,
    RewardModule,
)
from rlhfkit.modules.optimizers.factories import state_bytes
from rlhfkit.roles import FrozenModel, ModelPool
from rlhfkit.strategies import RLHFDeepSpeedStrategy, SequenceParallelDDPStrategy, register
from rlhfkit.validation import resolve_function

_PLAIN = ("auto", "ddp", "single_device")


def model_roles(module: PolicyModule, precision: Precision, *, fused: bool) -> dict[str, Any]:
    """Shapes of all models that the module trains or holds, and of those that it has elsewhere.

    ``fused``: whether AdamW would take its fused kernels on ranks of a critic's own.
    """

    def shape(name: str, *, trained: bool = False) -> ModelShape:
        own: dict[str, Any] = {"lora": module.lora, "quantization": module.quantization} if trained else {}
        return model_shape(name, **own, trust_remote_code=module.trust_remote_code)

    policy, base = shape(module.model_name, trained=True), base_model_name(module.model_name)
    if isinstance(module, RewardModule | ProcessRewardModule):
        policy = policy.with_scalar_head()
    roles: dict[str, Any] = {"policy": policy}
    if isinstance(module, ReferenceModule) and module.uses_reference and module.ref_model_name is not None:
        roles["reference"] = shape(module.ref_model_name)
    elif module.needs_reference and policy.adapters:
        roles["reference_is_policy"] = True
    elif module.needs_reference:
        roles["reference"] = shape(module.model_name)
    if isinstance(module, PPOModule) and not module.shared_backbone and module.critic_elsewhere is None:
        roles["critic"] = shape(module.critic_name or base, trained=True)
    if isinstance(module, DistillationModule) and module.precompute_teacher:
        return roles
    elsewhere = isinstance(module, OnPolicyDistillationModule) and module.teacher_pool is not None
    elsewhere |= isinstance(module, DistillationModule) and module.served_teacher is not None
    if isinstance(module, DistillationModule | OnPolicyDistillationModule) and not elsewhere:
        roles["teacher"] = shape(module.teacher_name)
        if isinstance(module, OnPolicyDistillationModule):
            roles["more_teachers"] = tuple(map(shape, list(module.domains.names.values())[1:]))
    if isinstance(module, OnPolicyModule):
        roles["entropy"] = module.needs_entropy
        shared = isinstance(module, PPOModule) and module.shared_backbone  # its pass for values gives them too
        statistics = module.needs_sum_squares or module.token_filter.top_entropy is not None
        roles["old_logprobs"] = module.needs_old_logprobs or shared or statistics
        roles["later_logprobs"] = module.proximal == "recompute"
        roles["prepare_tokens"] = module.max_tokens_per_forward
        held = [shape(one) for one in module.reward_models.values() if isinstance(one, str)]
        roles |= {"reward_model": held[0], "more_reward_models": tuple(held[1:])} if held else {}
    roles["placed"] = (*_placed(module, shape), *_placed_critic(module, shape, precision, fused=fused))
    return roles


def _placed(module: PolicyModule, shape: Callable[[str], ModelShape]) -> list[PlacedModel]:
    """Frozen models in pools of their own; a replica without GPUs among its resources is described as having one."""
    pools: list[tuple[PlacedRole, str, FrozenModel | None]] = []
    if isinstance(module, OnPolicyModule):
        pools.append(("reference", "", module.reference_pool))
        pools += [("reward model", name, one) for name, one in module.reward_models.items() if not isinstance(one, str)]
    if isinstance(module, OnPolicyDistillationModule):
        pools.append(("teacher", "", module.teacher_pool))
    if isinstance(module, PPOModule) and module.frozen_critic is not None:
        pools.append(("frozen critic", "", module.frozen_critic.pool))
    return [
        PlacedModel(
            role=role,
            name=name,
            shape=shape(pool.model),
            replicas=pool.num_replicas,
            gpus=pool.ranks_per_replica * _gpus_of(pool.resources),
        )
        for role, name, pool in pools
        if isinstance(pool, ModelPool)  # what is served runs already, whatever trains
    ]


def _placed_critic(
    module: PolicyModule, shape: Callable[..., ModelShape], precision: Precision, *, fused: bool
) -> list[PlacedModel]:
    """The critic that ranks of its own train."""
    if not isinstance(module, PPOModule) or module.remote_critic is None:
        return []
    pool = module.remote_critic.pool
    strategy: str | Strategy = pool.strategy
    if pool.strategy_arguments:
        register()
        entry = StrategyRegistry[pool.strategy]
        strategy = entry["strategy"](**entry["init_params"] | pool.strategy_arguments)
    own = precision if pool.precision is None else Precision.of(pool.precision, deepspeed=True)
    function = module.optimizer_function
    if pool.optimizer:
        function = resolve_function(pool.optimizer, "optimizer", home="rlhfkit.modules.optimizers")
    arguments = pool.optimizer_arguments if pool.optimizer else module.optimizer_arguments
    return [
        PlacedModel(
            role="critic",
            shape=shape(
                pool.model if isinstance(pool.model, str) else base_model_name(module.model_name), trained=True
            ),
            gpus=pool.num_ranks,
            sharding=sharding_of(strategy, pool.num_ranks),
            precision=own,
            optimizer_state=state_bytes(function, arguments, itemsize=own.main_weights, fused=fused),
        )
    ]


def _gpus_of(resources: Mapping[str, float] | None) -> int:
    return max(1, math.ceil((resources or {}).get("GPU", 1)))


# ------------------------------------------------------------------------------------------------ the strategy


def sharding_of(strategy: str | Strategy, ranks: int) -> Sharding:
    """The sharding of a strategy or of its name.

    Raises:
        ValueError: If it is neither ours nor one of Lightning's that replicate everything, or if its forward groups do
            not divide the ranks.
    """
    if isinstance(strategy, str) and strategy.startswith("rlhf_"):
        register()
        if strategy in StrategyRegistry.available_strategies():
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
            overlap=bool(zero.get("overlap_comm", True)),
            live_parameters=int(live),
            sequence=strategy.sequence_parallel_size,
            tensor=strategy.tensor_parallel_size,
            sequence_parallel=strategy.sequence_parallel,
        )
    if isinstance(strategy, SequenceParallelDDPStrategy):
        size, kind = strategy.sequence_parallel_size, strategy.sequence_parallel
        return Sharding(ranks=ranks, sequence=size, sequence_parallel=kind)
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    if name not in _PLAIN and name not in ("DDPStrategy", "SingleDeviceStrategy"):
        known = [one for one in StrategyRegistry.available_strategies() if one.startswith("rlhf_")]
        raise ValueError(
            f"strategy must be one of {', '.join([*_PLAIN, *known])}, or an RLHFDeepSpeedStrategy, got {name!r}"
        )
    return Sharding(ranks=ranks)
