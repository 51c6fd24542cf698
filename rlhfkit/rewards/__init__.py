"""Rewards: functions and classes that score samples. Importing this package loads torch and nothing else.

``subprocesses.py`` runs rewards in other processes, which ``sandbox/`` starts and confines; ``programs/`` tests
generated code, ``remote/`` asks reward servers, ``judges.py`` compares answers in pairs.

May import: models, data, serving, ``validation.py``.
Start at :mod:`rlhfkit.rewards.base`, then ``rules.py`` for short examples.
"""

from rlhfkit.rewards.base import Reward, evaluate
from rlhfkit.rewards.composition import CosineLength, EnvironmentReward, LastTurnReward, WeightedSum
from rlhfkit.rewards.judges import ChatJudge, PairwiseReward
from rlhfkit.rewards.math import MathMatch, math_match
from rlhfkit.rewards.models import ModelReward, ProcessModelReward, StepTokens
from rlhfkit.rewards.programs.execution import CodeExecution
from rlhfkit.rewards.programs.python_tool import PythonTool, python
from rlhfkit.rewards.remote.reward import RemoteReward
from rlhfkit.rewards.rules import (
    ExactMatch,
    FormatReward,
    LengthPenalty,
    ReasoningFormat,
    RepetitionPenalty,
    TagCount,
    exact_match,
)
from rlhfkit.rewards.subprocesses import SandboxedReward, SubprocessReward

__all__ = [
    "ChatJudge",
    "CodeExecution",
    "CosineLength",
    "EnvironmentReward",
    "ExactMatch",
    "FormatReward",
    "LastTurnReward",
    "LengthPenalty",
    "MathMatch",
    "ModelReward",
    "PairwiseReward",
    "ProcessModelReward",
    "PythonTool",
    "ReasoningFormat",
    "RemoteReward",
    "RepetitionPenalty",
    "Reward",
    "SandboxedReward",
    "StepTokens",
    "SubprocessReward",
    "TagCount",
    "WeightedSum",
    "evaluate",
    "exact_match",
    "math_match",
    "python",
]
