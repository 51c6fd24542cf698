"""Find the parts of a Trainer: its callbacks, its DataModule, and its module by what is asked of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rlhfkit.protocols import ComparesGroups, ExperienceSource, LearnsFromText

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.profilers import Profiler

    from rlhfkit.protocols import ExperienceLearner, GenerativeModule, PromptSource


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """Return the callbacks of a Trainer, in calling order."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector of Lightning
    return callbacks


def profiler_of(trainer: L.Trainer) -> Profiler:
    """Return the profiler of a Trainer."""
    profiler: Profiler = trainer.profiler  # type: ignore[attr-defined]  # set by Lightning outside its class
    return profiler


def datamodule_of(trainer: L.Trainer) -> L.LightningDataModule | None:
    """Return the DataModule of a Trainer; ``None``: it was given loaders."""
    data: L.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    return data


def prompts_of(trainer: L.Trainer) -> PromptSource:
    """Return the Trainer's DataModule as a source of prompts; TypeError if it has no ``prompt_queue()``."""
    data = datamodule_of(trainer)
    if not hasattr(data, "prompt_queue"):
        raise TypeError(
            "RolloutCallback takes its prompts from a DataModule with prompt_queue(): call "
            "trainer.fit(module, datamodule=PromptDataModule(...))"
        )
    return cast("PromptSource", data)


def learns_from_text(trainer: L.Trainer) -> bool:
    """Return whether the Trainer's LightningModule, or a part of it, learns from pretraining text."""
    learners = [trainer.lightning_module, *callbacks_of(trainer)]
    return any(isinstance(one, LearnsFromText) and one.learns_from_text for one in learners)


def epochs_of(trainer: L.Trainer) -> int:
    """Return how often an iteration is trained on: its DataModule's ``epochs_per_iteration``; 1 if it has none.

    1 with ``fast_dev_run`` too, whose iterations have as many micro-batches as it says.
    """
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by Lightning outside its class
        return 1
    return int(getattr(datamodule_of(trainer), "epochs_per_iteration", 1))


def compares_groups(module: object) -> bool:
    """Return whether a module's loss compares samples of one prompt, which then must be in one micro-batch."""
    return isinstance(module, ComparesGroups) and module.keeps_groups_together


def policy_of(trainer: L.Trainer) -> GenerativeModule:
    """Return the Trainer's LightningModule as one with a policy."""
    return cast("GenerativeModule", trainer.lightning_module)


def learner_of(trainer: L.Trainer) -> ExperienceLearner:
    """Return the Trainer's module as one that learns from its samples; TypeError if it has no ``prepare()``."""
    module = trainer.lightning_module
    if not callable(getattr(module, "prepare", None)):
        raise TypeError(
            "RolloutCallback trains modules that prepare experience (GRPOModule ...), but "
            f"{type(module).__name__} has no prepare(); an SFTModule needs no RolloutCallback"
        )
    return cast("ExperienceLearner", module)


def experience_source_of(trainer: L.Trainer) -> ExperienceSource:
    """Return the Trainer's callback that makes experience of prompts; ValueError unless there is exactly one."""
    sources = [callback for callback in callbacks_of(trainer) if isinstance(callback, ExperienceSource)]
    if len(sources) != 1:
        found = ", ".join(type(source).__name__ for source in sources) or "none"
        raise ValueError(
            "PromptDataModule needs exactly one callback that collects experience, e.g. Trainer(callbacks="
            f"[RolloutCallback(...)]); found {found}"
        )
    return sources[0]
