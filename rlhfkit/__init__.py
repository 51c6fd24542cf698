"""Composable RLHF building blocks for PyTorch Lightning.

Every public name is imported on first use (PEP 562): ``import rlhfkit`` itself loads neither torch nor Lightning.
"""

from typing import TYPE_CHECKING, Any

from rlhfkit._version import __version__

if TYPE_CHECKING:
    from rlhfkit.callbacks import (
        EMA,
        Ahead,
        DynamicSampling,
        HFExport,
        Invariants,
        NonFiniteGuard,
        Oversampling,
        ReplayBuffer,
        RolloutCallback,
        RolloutDump,
        RunReport,
        SampleTable,
        Validation,
    )
    from rlhfkit.costs import estimate
    from rlhfkit.data import Experience, Prompt, Sample
    from rlhfkit.datamodules import (
        Mixture,
        PreferenceDataModule,
        PromptDataModule,
        SFTDataModule,
        StepwiseDataModule,
        UnpairedPreferenceDataModule,
    )
    from rlhfkit.episodes import AgentEpisodes, Environment, Episodes, Step
    from rlhfkit.losses import LossOutput
    from rlhfkit.models import LoRA, ModelLoading, PolicyOutput, ScalarModel
    from rlhfkit.modules import (
        BCOModule,
        CPOModule,
        DFTModule,
        DistillationModule,
        DPOModule,
        GRPOModule,
        KTOModule,
        OnlineDPOModule,
        OnPolicyDistillationModule,
        OnPolicyModule,
        Optimization,
        ORPOModule,
        PolicyModule,
        PPOModule,
        PreferenceModule,
        ProcessRewardModule,
        RewardModule,
        SFTModule,
        SimPOModule,
        local_rows,
    )
    from rlhfkit.parts import Part, Prepare, Stage
    from rlhfkit.roles import CriticPool, ModelPool, Placement, RoleResources, ServedModel
    from rlhfkit.rollout import (
        HealthPolicy,
        LocalEngine,
        ReplayEngine,
        RolloutEngine,
        SamplingSpec,
        VLLMPool,
        VLLMServer,
    )
    from rlhfkit.strategies import RLHFDeepSpeedStrategy

_HOMES = {
    "Ahead": "callbacks",
    "AgentEpisodes": "episodes",
    "BCOModule": "modules",
    "CPOModule": "modules",
    "CriticPool": "roles",
    "DFTModule": "modules",
    "DPOModule": "modules",
    "DistillationModule": "modules",
    "DynamicSampling": "callbacks",
    "EMA": "callbacks",
    "Environment": "episodes",
    "Episodes": "episodes",
    "Experience": "data",
    "GRPOModule": "modules",
    "HFExport": "callbacks",
    "HealthPolicy": "rollout",
    "Invariants": "callbacks",
    "Part": "parts",
    "Prepare": "parts",
    "Stage": "parts",
    "KTOModule": "modules",
    "LoRA": "models",
    "ModelLoading": "models",
    "LocalEngine": "rollout",
    "LossOutput": "losses",
    "Mixture": "datamodules",
    "ModelPool": "roles",
    "NonFiniteGuard": "callbacks",
    "ORPOModule": "modules",
    "OnPolicyDistillationModule": "modules",
    "OnPolicyModule": "modules",
    "OnlineDPOModule": "modules",
    "Optimization": "modules",
    "Oversampling": "callbacks",
    "PPOModule": "modules",
    "PolicyModule": "modules",
    "PolicyOutput": "models",
    "PreferenceDataModule": "datamodules",
    "PreferenceModule": "modules",
    "ProcessRewardModule": "modules",
    "Placement": "roles",
    "Prompt": "data",
    "PromptDataModule": "datamodules",
    "RLHFDeepSpeedStrategy": "strategies",
    "ReplayBuffer": "callbacks",
    "ReplayEngine": "rollout",
    "RewardModule": "modules",
    "RoleResources": "roles",
    "RolloutCallback": "callbacks",
    "RolloutDump": "callbacks",
    "RunReport": "callbacks",
    "RolloutEngine": "rollout",
    "SFTDataModule": "datamodules",
    "SFTModule": "modules",
    "Sample": "data",
    "SampleTable": "callbacks",
    "SamplingSpec": "rollout",
    "ScalarModel": "models",
    "ServedModel": "roles",
    "SimPOModule": "modules",
    "Step": "episodes",
    "StepwiseDataModule": "datamodules",
    "UnpairedPreferenceDataModule": "datamodules",
    "Validation": "callbacks",
    "VLLMPool": "rollout",
    "VLLMServer": "rollout",
    "estimate": "costs",
    "local_rows": "modules",
}

_LIGHTNING = ("callbacks", "datamodules", "modules", "strategies")
"""Rooms that load Lightning anyway."""

__all__ = [
    "EMA",
    "AgentEpisodes",
    "Ahead",
    "BCOModule",
    "CPOModule",
    "CriticPool",
    "DFTModule",
    "DPOModule",
    "DistillationModule",
    "DynamicSampling",
    "Environment",
    "Episodes",
    "Experience",
    "GRPOModule",
    "HFExport",
    "HealthPolicy",
    "Invariants",
    "KTOModule",
    "LoRA",
    "LocalEngine",
    "LossOutput",
    "Mixture",
    "ModelLoading",
    "ModelPool",
    "NonFiniteGuard",
    "ORPOModule",
    "OnPolicyDistillationModule",
    "OnPolicyModule",
    "OnlineDPOModule",
    "Optimization",
    "Oversampling",
    "PPOModule",
    "Part",
    "Placement",
    "PolicyModule",
    "PolicyOutput",
    "PreferenceDataModule",
    "PreferenceModule",
    "Prepare",
    "ProcessRewardModule",
    "Prompt",
    "PromptDataModule",
    "RLHFDeepSpeedStrategy",
    "ReplayBuffer",
    "ReplayEngine",
    "RewardModule",
    "RoleResources",
    "RolloutCallback",
    "RolloutDump",
    "RolloutEngine",
    "RunReport",
    "SFTDataModule",
    "SFTModule",
    "Sample",
    "SampleTable",
    "SamplingSpec",
    "ScalarModel",
    "ServedModel",
    "SimPOModule",
    "Stage",
    "Step",
    "StepwiseDataModule",
    "UnpairedPreferenceDataModule",
    "VLLMPool",
    "VLLMServer",
    "Validation",
    "__version__",
    "estimate",
    "local_rows",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rlhfkit' has no attribute {name!r}")
    from importlib import import_module

    if _HOMES[name] in _LIGHTNING:
        import_module("rlhfkit.first_lines").silence_tips()  # before Lightning and DeepSpeed have any
        import_module("rlhfkit.strategies")  # registers the names, so that Trainer(strategy="rlhf_zero2") works
    value = getattr(import_module(f"rlhfkit.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, for completion in notebooks."""
    return sorted({*globals(), *__all__})
