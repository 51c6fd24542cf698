"""DataModules: files of the user become prompts for reinforcement learning or examples for supervised training.

May import: data, models, ``protocols.py``, ``validation.py``; never callbacks, modules or strategies.
Start at :mod:`rlhfkit.datamodules.sft`; for reinforcement learning at :mod:`rlhfkit.datamodules.prompts.datamodule`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhfkit.datamodules.preference import PreferenceDataModule as PreferenceDataModule
    from rlhfkit.datamodules.prompts.datamodule import PromptDataModule as PromptDataModule
    from rlhfkit.datamodules.sft import SFTDataModule as SFTDataModule
    from rlhfkit.datamodules.stepwise import StepwiseDataModule as StepwiseDataModule
    from rlhfkit.datamodules.tokenization.mixture import Mixture as Mixture
    from rlhfkit.datamodules.unpaired import UnpairedPreferenceDataModule as UnpairedPreferenceDataModule

_HOMES = {
    "Mixture": "rlhfkit.datamodules.tokenization.mixture",
    "PreferenceDataModule": "rlhfkit.datamodules.preference",
    "PromptDataModule": "rlhfkit.datamodules.prompts.datamodule",
    "SFTDataModule": "rlhfkit.datamodules.sft",
    "StepwiseDataModule": "rlhfkit.datamodules.stepwise",
    "UnpairedPreferenceDataModule": "rlhfkit.datamodules.unpaired",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Load a public name, and Lightning with it, when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
