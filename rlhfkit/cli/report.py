"""``rlhfkit report``: one page that compares runs."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rlhfkit.callbacks.report.page import read_page, write_page


def report(runs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] = "comparison.html") -> Path:
    """Write one HTML page that shows several runs: their curves in one plot, and where their configurations differ.

    Args:
        runs: Pages that :class:`~rlhfkit.RunReport` has written, or folders with one page each.
        output: The page; replaced if it exists.

    Returns:
        The page.

    Raises:
        ValueError: If a folder has no page or several, or a file is no report.
    """
    found = [(run, Path(given)) for given in runs for run in read_page(page_of(Path(given)))]
    names = [run.name for run, _ in found]
    for run, given in found:
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({given})"
    return write_page(Path(output), [run for run, _ in found])


def page_of(given: Path) -> Path:
    """The page that was given, or the only one in a folder."""
    if given.is_file():
        return given
    pages = sorted(given.rglob("*.html")) if given.is_dir() else []
    if len(pages) != 1:
        listed = ", ".join(str(page) for page in pages[:5]) or "none"
        raise ValueError(f"{given} must be the report of a run, or a folder with one; pages there: {listed}")
    return pages[0]


def report_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="rlhfkit report", description="One HTML page that compares runs.")
    parser.add_argument("runs", nargs="+", help="report.html of each run, or the folder that it is in")
    parser.add_argument("--output", default="comparison.html", help="the page that is written (default: %(default)s)")
    return parser


def report_command(words: Sequence[str]) -> None:
    """Run the command with the words of a command line."""
    given = report_parser().parse_args(list(words))
    print(report(given.runs, given.output))
