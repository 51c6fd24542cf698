"""``SampleTable``: print a table of samples once per iteration."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.data.types import Sample
from rlhfkit.distributed import gather_objects
from rlhfkit.validation import check_integer

T = TypeVar("T")


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
        if trainer.current_epoch % self.every_n_iterations == 0 and rollouts.inside_collected_iteration:
            table = self.table(rollouts, f"iteration {trainer.current_epoch}")
            if trainer.is_global_zero:
                self._print(table)

    def _print(self, table: Any) -> None:
        from rich.console import Console

        Console().print(table)

    def table(self, rollouts: RolloutCallback, title: str) -> Any:
        """A ``rich.table.Table`` of the samples of the current iteration. A collective: ranks show theirs."""
        from rich.markup import escape
        from rich.table import Table

        pairs = list(zip(rollouts.sample_rows, rollouts.samples, strict=True))
        chosen = self._best_and_worst(pairs, lambda pair: pair[1].reward)
        own = [_Row.of(row, sample, self, rollouts) for row, sample in chosen]  # decodes no other text
        everyone = sorted(row for share in gather_objects(own) for row in share)
        shown = self._best_and_worst(everyone, lambda row: row.reward)
        parts = sorted({name for row in shown for name in row.reward_parts})
        table = Table("prompt", "completion", *parts, "reward", "advantage", title=title, show_lines=False)
        for row in shown:
            numbers = [row.reward_parts.get(name) for name in parts] + [row.reward, row.advantage]
            table.add_row(
                escape(row.prompt),
                escape(row.completion),
                *("-" if number is None else f"{number:+.2f}" for number in numbers),
            )
        return table

    def _best_and_worst(self, items: list[T], reward: Callable[[T], float | None]) -> list[T]:
        ranked = sorted(items, key=lambda item: -(reward(item) or 0.0))
        half = (self.rows + 1) // 2
        return ranked if len(ranked) <= self.rows else ranked[:half] + ranked[len(ranked) - (self.rows - half) :]

    def completion(self, sample: Sample) -> str:
        text = self.cut(sample.text, front=False)
        return text if sample.finish_reason == "stop" else f"{text} [{sample.finish_reason}]"

    def cut(self, text: str, *, front: bool) -> str:
        """A text without what is too much of it, at its front or its end."""
        if len(text) <= self.max_characters:
            return text
        return "…" + text[-self.max_characters :] if front else text[: self.max_characters] + "…"


class _Row(NamedTuple):
    """What is shown of a sample."""

    row: int
    prompt: str
    completion: str
    reward_parts: dict[str, float]
    reward: float | None
    advantage: float | None

    @classmethod
    def of(cls, row: int, sample: Sample, table: SampleTable, rollouts: RolloutCallback) -> Self:
        """What a table shows of a row of the iteration."""
        advantages = rollouts.mean_advantages
        return cls(
            row,
            table.cut(sample.prompt.text, front=True),
            table.completion(sample),
            sample.reward_parts,
            sample.reward,
            None if advantages is None else float(advantages[row]),
        )
