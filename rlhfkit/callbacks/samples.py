"""``SampleTable``: print a table of samples once per iteration."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.data.types import Sample
from rlhfkit.validation import check_integer


class SampleTable(Callback):
    """Print a table of samples: prompt, completion, parts of the reward, reward, advantage.

    Args:
        rows: Number of samples: half with the highest rewards, half with the lowest.
        every_n_iterations: Print at iterations 0, n, 2n ...
        max_characters: Longer prompts are cut at the start, longer completions at the end.

    Raises:
        ValueError: If a number is below 1.
    """

    def __init__(self, *, rows: int = 6, every_n_iterations: int = 1, max_characters: int = 200) -> None:
        for name, value in {
            "rows": rows,
            "every_n_iterations": every_n_iterations,
            "max_characters": max_characters,
        }.items():
            check_integer(name, value, minimum=1)
        self.rows = rows
        self.every_n_iterations = every_n_iterations
        self.max_characters = max_characters

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the table of the iteration that was just trained on, on rank 0."""
        rollouts = RolloutCallback.of(trainer)
        if trainer.is_global_zero and trainer.current_epoch % self.every_n_iterations == 0 and rollouts.samples:
            self._print(rollouts, f"iteration {trainer.current_epoch}")

    def _print(self, rollouts: RolloutCallback, title: str) -> None:
        from rich.console import Console

        Console().print(self.table(rollouts, title))

    def table(self, rollouts: RolloutCallback, title: str) -> Any:
        """A ``rich.table.Table`` of the samples of the current iteration."""
        from rich.markup import escape
        from rich.table import Table

        experience = rollouts.experience
        advantages: list[float | None] = [None] * len(rollouts.samples)
        if experience is not None and experience.advantages is not None:
            chosen = experience.action_mask
            sums = (experience.advantages * chosen).sum(-1) / chosen.sum(-1).clamp(min=1)
            advantages = sums.tolist()
        ranked = sorted(range(len(rollouts.samples)), key=lambda row: -(rollouts.samples[row].reward or 0.0))
        half = (self.rows + 1) // 2
        shown = ranked if len(ranked) <= self.rows else ranked[:half] + ranked[len(ranked) - (self.rows - half) :]
        parts = sorted({name for row in shown for name in rollouts.samples[row].reward_parts})
        table = Table("prompt", "completion", *parts, "reward", "advantage", title=title, show_lines=False)
        for row in shown:
            sample = rollouts.samples[row]
            numbers = [sample.reward_parts.get(name) for name in parts] + [sample.reward, advantages[row]]
            table.add_row(
                escape(self._cut(sample.prompt.text, front=True)),
                escape(self._completion(sample)),
                *("-" if number is None else f"{number:+.2f}" for number in numbers),
            )
        return table

    def _completion(self, sample: Sample) -> str:
        text = self._cut(sample.text, front=False)
        return text if sample.finish_reason == "stop" else f"{text} [{sample.finish_reason}]"

    def _cut(self, text: str, *, front: bool) -> str:
        if len(text) <= self.max_characters:
            return text
        return "…" + text[-self.max_characters :] if front else text[: self.max_characters] + "…"
