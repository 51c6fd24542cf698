"""Features of modules as parts, one idea in a file: what a run does not use is not loaded.

``from rlhfkit.modules.parts import EntropyBonus`` imports the file of that part alone.

May import: ``rlhfkit.parts``, the files of ``modules/``, models, data, losses. Other files of ``modules/`` import one
where its argument is read, not at their top.
Start at :mod:`rlhfkit.modules.parts.entropy`, then :mod:`rlhfkit.parts`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfkit.modules.parts.advantages import AdvantagesBy as AdvantagesBy
    from rlhfkit.modules.parts.advantages import GroupAdvantages as GroupAdvantages
    from rlhfkit.modules.parts.advantages import TokenCredit as TokenCredit
    from rlhfkit.modules.parts.advantages import WhitenAdvantages as WhitenAdvantages
    from rlhfkit.modules.parts.answer_reference import PrecomputedReference as PrecomputedReference
    from rlhfkit.modules.parts.correction import Correction as Correction
    from rlhfkit.modules.parts.correction import NoCorrection as NoCorrection
    from rlhfkit.modules.parts.critic import GAE as GAE
    from rlhfkit.modules.parts.critic import Critic as Critic
    from rlhfkit.modules.parts.critic import CriticWarmup as CriticWarmup
    from rlhfkit.modules.parts.critic import Returns as Returns
    from rlhfkit.modules.parts.critic import ValueLoss as ValueLoss
    from rlhfkit.modules.parts.entropy import EntropyBonus as EntropyBonus
    from rlhfkit.modules.parts.entropy import EntropyTarget as EntropyTarget
    from rlhfkit.modules.parts.fine_tuning import NEFTune as NEFTune
    from rlhfkit.modules.parts.fine_tuning import TokenMetrics as TokenMetrics
    from rlhfkit.modules.parts.kl_control import KLTarget as KLTarget
    from rlhfkit.modules.parts.kl_control import StopEarly as StopEarly
    from rlhfkit.modules.parts.kl_penalty import KLInReward as KLInReward
    from rlhfkit.modules.parts.kl_penalty import KLPenalty as KLPenalty
    from rlhfkit.modules.parts.kl_penalty import Reference as Reference
    from rlhfkit.modules.parts.moving_reference import MovingReference as MovingReference
    from rlhfkit.modules.parts.old_policy import LogLinear as LogLinear
    from rlhfkit.modules.parts.pairs import Pairs as Pairs
    from rlhfkit.modules.parts.precomputed_teacher import PrecomputedTeacher as PrecomputedTeacher
    from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss as PretrainingLoss
    from rlhfkit.modules.parts.reward_model import RewardModel as RewardModel
    from rlhfkit.modules.parts.rewards import ClipRewards as ClipRewards
    from rlhfkit.modules.parts.rewards import MaskTruncated as MaskTruncated
    from rlhfkit.modules.parts.rewards import MissingEndPenalty as MissingEndPenalty
    from rlhfkit.modules.parts.rewards import NormalizeRewards as NormalizeRewards
    from rlhfkit.modules.parts.rewards import StopProperly as StopProperly
    from rlhfkit.modules.parts.routers import RouterLoss as RouterLoss
    from rlhfkit.modules.parts.routers import RouterReplay as RouterReplay
    from rlhfkit.modules.parts.teacher import DivergenceLoss as DivergenceLoss
    from rlhfkit.modules.parts.teacher import Teacher as Teacher
    from rlhfkit.modules.parts.teacher import TeacherAdvantages as TeacherAdvantages
    from rlhfkit.modules.parts.token_filters import OffPolicyMask as OffPolicyMask
    from rlhfkit.modules.parts.token_filters import Rejection as Rejection
    from rlhfkit.modules.parts.token_filters import TopEntropy as TopEntropy

_FILES = {
    "AdvantagesBy": "advantages",
    "ClipRewards": "rewards",
    "Correction": "correction",
    "NoCorrection": "correction",
    "Critic": "critic",
    "CriticWarmup": "critic",
    "DivergenceLoss": "teacher",
    "EntropyBonus": "entropy",
    "EntropyTarget": "entropy",
    "GAE": "critic",
    "GroupAdvantages": "advantages",
    "KLInReward": "kl_penalty",
    "KLPenalty": "kl_penalty",
    "KLTarget": "kl_control",
    "LogLinear": "old_policy",
    "MaskTruncated": "rewards",
    "MissingEndPenalty": "rewards",
    "MovingReference": "moving_reference",
    "NEFTune": "fine_tuning",
    "NormalizeRewards": "rewards",
    "OffPolicyMask": "token_filters",
    "Pairs": "pairs",
    "PrecomputedReference": "answer_reference",
    "PrecomputedTeacher": "precomputed_teacher",
    "PretrainingLoss": "pretraining_loss",
    "Reference": "kl_penalty",
    "Rejection": "token_filters",
    "Returns": "critic",
    "RewardModel": "reward_model",
    "RouterLoss": "routers",
    "RouterReplay": "routers",
    "StopEarly": "kl_control",
    "StopProperly": "rewards",
    "Teacher": "teacher",
    "TeacherAdvantages": "teacher",
    "TokenCredit": "advantages",
    "TokenMetrics": "fine_tuning",
    "TopEntropy": "token_filters",
    "ValueLoss": "critic",
    "WhitenAdvantages": "advantages",
}
"""Names of parts, and their files."""

__all__ = [*_FILES]


def __getattr__(name: str) -> Any:
    """Import a part when it is first used (PEP 562)."""
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rlhfkit.modules.parts.{_FILES[name]}"), name)
