"""One LightningModule per loss."""

from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.grpo import GRPOModule
from rlhfkit.modules.sft import SFTModule

__all__ = ["GRPOModule", "PolicyModule", "SFTModule"]
