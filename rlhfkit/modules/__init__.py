"""One LightningModule per loss."""

from rlhfkit.modules import presets
from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.distillation import DistillationModule
from rlhfkit.modules.dpo import DPOModule
from rlhfkit.modules.grpo import GRPOModule
from rlhfkit.modules.kto import KTOModule
from rlhfkit.modules.on_policy import OnPolicyModule
from rlhfkit.modules.on_policy_distillation import OnPolicyDistillationModule
from rlhfkit.modules.ppo import PPOModule
from rlhfkit.modules.preference import PreferenceModule
from rlhfkit.modules.process_reward import ProcessRewardModule
from rlhfkit.modules.reference import ReferenceModule
from rlhfkit.modules.reference_free import CPOModule, ORPOModule, SimPOModule
from rlhfkit.modules.reward import RewardModule
from rlhfkit.modules.scalar import ScalarModule
from rlhfkit.modules.sft import DFTModule, SFTModule

__all__ = [
    "CPOModule",
    "DFTModule",
    "DPOModule",
    "DistillationModule",
    "GRPOModule",
    "KTOModule",
    "ORPOModule",
    "OnPolicyDistillationModule",
    "OnPolicyModule",
    "PPOModule",
    "PolicyModule",
    "PreferenceModule",
    "ProcessRewardModule",
    "ReferenceModule",
    "RewardModule",
    "SFTModule",
    "ScalarModule",
    "SimPOModule",
    "presets",
]
