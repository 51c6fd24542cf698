"""A progress bar on the error stream, so that standard output stays free for pipes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(
    title: str, total: int, *, done: int = 0, unit: str, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show progress while the context lasts.

    Args:
        title: In front of the bar.
        total: Where it ends.
        done: Where it starts.
        unit: What is counted.
        shown: False: nothing is printed.

    Yields:
        A function that moves the bar on by a count.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*parts, *times, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(title, total=total, completed=done)
        yield lambda count: progress.advance(task, count)
