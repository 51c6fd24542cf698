"""What an iteration does with the prompts of a DataModule, without one, and prompts without a data set."""

from typing import Any

from rlhfkit import Prompt, PromptDataModule
from rlhfkit.datamodules.prompts.table import TablePrompts


class NumberedRows:
    """Prompts whose ``index`` counts from ``first`` on."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.rows = range(first, first + count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Prompt:
        return Prompt(self.rows[position], [5])

    def fingerprint(self) -> str:
        return str(self.rows)


def numbered(count: int, *, first: int = 0, **options: Any) -> TablePrompts:
    """So many prompts, as those of one source."""
    return TablePrompts([NumberedRows(count, first)], **options)  # type: ignore[list-item]


def advance(data: PromptDataModule, count: int) -> None:
    """Move the cursor past the next prompts."""
    queue = data.prompt_queue()
    queue.take(count)
    data.set_cursor(queue.after)
