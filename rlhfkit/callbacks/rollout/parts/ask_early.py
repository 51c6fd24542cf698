"""``AskEarly``: the module's models on machines of their own are asked while samples are made."""

from collections.abc import Sequence

import lightning as L

from rlhfkit.callbacks.rollout.part import RolloutPart
from rlhfkit.callbacks.rollout.source import Ask
from rlhfkit.data.types import Experience
from rlhfkit.protocols import AsksWhileSampling
from rlhfkit.rollout.collector import Group


class AskEarly(RolloutPart):
    """Asks them about groups that are finished, before they are scored, while others are sampled.

    A ``RolloutCallback`` has it if its module has such models.

    Args:
        module: The module that has them.
    """

    def __init__(self, module: AsksWhileSampling) -> None:
        self.module = module

    def check(self, trainer: L.Trainer) -> None:
        self.rollouts.collector.on_finished = self.ask

    def before_collect(self, trainer: L.Trainer, iteration: int) -> None:
        self.module.placed.begin_asking(iteration)

    def ask(self, ask: Ask, groups: Sequence[Group]) -> None:
        """Ask about groups; in any thread."""
        for group in groups:
            temperature = ask.sampling.temperature or 1.0
            rows = Experience.from_samples(group, temperature=temperature, before_rewards=True)
            self.module.placed.ask_early(rows, ask.iteration)

    def after_prepare(self, trainer: L.Trainer, iteration: int) -> None:
        """Note how long this rank has waited for the models, and how long they worked unnoticed."""
        self.rollouts.timing.note(self.module.placed.take_seconds(), iteration)

    def close(self) -> None:
        """End the models, as the module's ``teardown`` does, which Lightning does not call after an error."""
        self.module.placed.close()
