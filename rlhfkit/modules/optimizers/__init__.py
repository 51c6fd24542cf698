"""Optimizers by name, parameter groups with rates of their own, learning-rate schedules.

May import: ``distributed.py``, ``validation.py``; bitsandbytes and DeepSpeed when used. Start at
:mod:`rlhfkit.modules.optimizers.factories`; :mod:`rlhfkit.modules.optim` puts all of it together for modules.

The functions here are the values of a module's ``optimizer`` argument. One of your own is given parameter groups, and
``lr``, ``weight_decay``, ``betas`` and ``trainer`` if it has such arguments; torch's classes are such functions.
"""

from rlhfkit.modules.optimizers.factories import adafactor, adamw, adamw_8bit, muon, sgd
from rlhfkit.modules.optimizers.muon_adamw import Muon

__all__ = ["Muon", "adafactor", "adamw", "adamw_8bit", "muon", "sgd"]
