"""``SampleTable``: print a table of samples once per iteration, and give it to loggers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from rlhfkit.callbacks.rollout.callback import RolloutCallback
from rlhfkit.data.types import Sample
from rlhfkit.distributed import gather_objects
from rlhfkit.validation import check_integer

T = TypeVar("T")


class SampleTable(Callback):
    """Print a table of samples: prompt, completion, parts of the reward, reward, advantage.

    Loggers of Weights & Biases, MLflow and TensorBoard get it as a table named ``samples``, with the iteration.

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
            columns, rows = self.table(rollouts)
            if trainer.is_global_zero:
                self._print(columns, rows, f"iteration {trainer.current_epoch}")
                for logger in trainer.loggers:
                    log_table(logger, columns, rows, trainer.current_epoch, trainer.global_step)

    def _print(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*columns, title=title, show_lines=False)
        for row in rows:
            table.add_row(*(escape(_shown(value)) for value in row))
        Console().print(table)

    def table(self, rollouts: RolloutCallback) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of the samples of the current iteration. A collective: ranks show theirs."""
        pairs = list(zip(rollouts.sample_rows, rollouts.samples, strict=True))
        chosen = self._best_and_worst(pairs, lambda pair: pair[1].reward)
        own = [_Row.of(row, sample, self, rollouts) for row, sample in chosen]  # decodes no other text
        everyone = sorted(row for share in gather_objects(own) for row in share)
        shown = self._best_and_worst(everyone, lambda row: row.reward)
        parts = sorted({name for row in shown for name in row.reward_parts})
        columns = ["prompt", "completion", *parts, "reward", "advantage"]
        return columns, [
            [row.prompt, row.completion, *map(row.reward_parts.get, parts), row.reward, row.advantage] for row in shown
        ]

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


def log_table(logger: Logger, columns: Sequence[str], rows: Sequence[Sequence[Any]], iteration: int, step: int) -> None:
    """Give a table to a logger as ``samples``; loggers that have no tables get nothing."""
    if isinstance(logger, WandbLogger):
        data = [[iteration, *row] for row in rows]
        logger.log_table("samples", columns=["iteration", *columns], data=data, step=step)
    elif isinstance(logger, MLFlowLogger):  # adds rows to those of earlier iterations
        by_column = {name: [row[place] for row in rows] for place, name in enumerate(columns)}
        table = {"iteration": [iteration] * len(rows), **by_column}
        logger.experiment.log_table(logger.run_id, table, "samples.json")
    elif isinstance(logger, TensorBoardLogger):
        lines = [columns, ["---"] * len(columns), *([_shown(value) for value in row] for row in rows)]
        cells = [[cell.replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        text = "\n".join("| " + " | ".join(line) + " |" for line in cells)
        logger.experiment.add_text("samples", text, step)


def _shown(value: Any) -> str:
    """A cell as text."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:+.2f}"


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
