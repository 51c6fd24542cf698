"""``PolicyArguments``: what all modules take beside their own arguments, for editors and type checkers.

A module writes ``**kwargs: Unpack[PolicyArguments]`` and hands them to :class:`~rlhfkit.modules.PolicyModule`, which
describes and checks them and has the defaults; command lines and ``help()`` read them there.
"""

from collections.abc import Sequence
from typing import TypedDict

from rlhfkit.models import LoRA, ModelLoading
from rlhfkit.modules.optim import Optimization
from rlhfkit.parts import GivenPart


class PolicyArguments(TypedDict, total=False):
    """Optimizer, loading of the model, and parts; all may be left out. :class:`PolicyModule` describes them."""

    optimization: Optimization | None
    lora: LoRA | None
    loading: ModelLoading | None
    parts: Sequence[GivenPart]
