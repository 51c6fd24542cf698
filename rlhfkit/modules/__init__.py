"""One LightningModule per algorithm: the loss, and what it needs from the batch.

May import: models, rollout, losses, data, checkpoints, ``protocols.py``; never callbacks, strategies or datamodules.
Start at :mod:`rlhfkit.modules.base`, then a room: ``supervised/``, ``preference/``, ``reward/``, ``on_policy/``.
"""

from rlhfkit.modules.base import PolicyModule
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.on_policy.distillation import OnPolicyDistillationModule
from rlhfkit.modules.on_policy.grpo import GRPOModule
from rlhfkit.modules.on_policy.online_dpo import OnlineDPOModule
from rlhfkit.modules.on_policy.ppo import PPOModule
from rlhfkit.modules.on_policy.ranks import local_rows
from rlhfkit.modules.optim import Optimization
from rlhfkit.modules.preference.base import PreferenceModule
from rlhfkit.modules.preference.dpo import DPOModule
from rlhfkit.modules.preference.reference_free import CPOModule, ORPOModule, SimPOModule
from rlhfkit.modules.preference.unpaired import BCOModule, KTOModule
from rlhfkit.modules.reward.process_reward import ProcessRewardModule
from rlhfkit.modules.reward.reward_model import RewardModule
from rlhfkit.modules.supervised.distillation import DistillationModule
from rlhfkit.modules.supervised.sft import DFTModule, SFTModule

__all__ = [
    "BCOModule",
    "CPOModule",
    "DFTModule",
    "DPOModule",
    "DistillationModule",
    "GRPOModule",
    "KTOModule",
    "ORPOModule",
    "OnPolicyDistillationModule",
    "OnPolicyModule",
    "OnlineDPOModule",
    "Optimization",
    "PPOModule",
    "PolicyModule",
    "PreferenceModule",
    "ProcessRewardModule",
    "RewardModule",
    "SFTModule",
    "SimPOModule",
    "local_rows",
]
