"""One LightningModule per loss."""

from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.grpo import GRPOModule
from rlhfkit.modules.kto import KTOModule
from rlhfkit.modules.on_policy import OnPolicyModule
from rlhfkit.modules.ppo import PPOModule
from rlhfkit.modules.sft import SFTModule

__all__ = [
    "GRPOModule",
    "KTOModule",
    "OnPolicyModule",
    "PPOModule",
    "PolicyModule",
    "SFTModule",
]
