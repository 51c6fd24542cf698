"""Features of the rollout side, one a file; a run without a feature does not enter its file.

May import: everything that ``callbacks/rollout`` may. No file outside imports a part at its top. Here is what a
``RolloutCallback`` has without being told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rlhfkit.callbacks.rollout.part import RolloutPart
    from rlhfkit.protocols import GenerativeModule
    from rlhfkit.rollout.engine import RolloutEngine


def default_parts(engines: Iterable[RolloutEngine]) -> list[RolloutPart]:
    """The parts of every run, unless another one of their class is given."""
    from rlhfkit.callbacks.rollout.parts.alarms import Alarms
    from rlhfkit.callbacks.rollout.parts.probe import Probe
    from rlhfkit.callbacks.rollout.parts.validation import Validation

    found: list[RolloutPart] = [Validation(), Probe(), Alarms()]
    if any(engine.colocate for engine in engines):
        from rlhfkit.callbacks.rollout.parts.shared_devices import SharedDevices

        found.append(SharedDevices())
    return found


def parts_of(module: GenerativeModule) -> list[RolloutPart]:
    """The parts that a module needs: for models of its own that score or are elsewhere, for greedy answers."""
    from rlhfkit.protocols import AsksWhileSampling, UsesGreedyRewards

    found: list[RolloutPart] = []
    if module.scorer is not None:
        from rlhfkit.callbacks.rollout.parts.of_module import ModelScores

        found.append(ModelScores())
    askers = [module, *getattr(module, "parts", ())]
    if any(isinstance(one, UsesGreedyRewards) and one.needs_greedy_rewards for one in askers):
        from rlhfkit.callbacks.rollout.parts.of_module import GreedyAnswers

        found.append(GreedyAnswers())
    if isinstance(module, AsksWhileSampling) and module.placed.present:
        from rlhfkit.callbacks.rollout.parts.of_module import AskEarly

        found.append(AskEarly(module))
    return found
