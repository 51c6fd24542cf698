"""One LightningModule per loss."""

from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.grpo import GRPOModule
from rlhfkit.modules.kto import KTOModule
from rlhfkit.modules.on_policy import OnPolicyModule
from rlhfkit.modules.ppo import PPOModule
from rlhfkit.modules.process_reward import ProcessRewardModule
from rlhfkit.modules.reward import RewardModule
from rlhfkit.modules.scalar import ScalarModule
from rlhfkit.modules.sft import SFTModule

__all__ = [
    "GRPOModule",
    "KTOModule",
    "OnPolicyModule",
    "PPOModule",
    "PolicyModule",
    "ProcessRewardModule",
    "RewardModule",
    "SFTModule",
    "ScalarModule",
]
