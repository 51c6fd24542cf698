"""What an iteration does with the prompts of a DataModule, without one."""

from rlhfkit import PromptDataModule


def advance(data: PromptDataModule, count: int) -> None:
    """Move the cursor past the next prompts."""
    queue = data.prompt_queue()
    queue.take(count)
    data.set_cursor(queue.after)
