"""Optimizers by name, and parameter groups with rates of their own.

May import: ``distributed.py``, ``flat_parameters.py``, ``validation.py``; bitsandbytes, when used.
Start at :mod:`rlhfkit.modules.optimizers.factories`.
"""

from rlhfkit.modules.optimizers.factories import adafactor, adamw, adamw_8bit, muon, sgd
from rlhfkit.modules.optimizers.muon_adamw import Muon

__all__ = ["Muon", "adafactor", "adamw", "adamw_8bit", "muon", "sgd"]
