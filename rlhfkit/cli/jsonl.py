"""``JSONLWriter``: a JSON Lines file that is written in batches and can be continued after an interruption.

The settings that determine the lines are saved beside it, in ``samples.jsonl.settings.json`` for ``samples.jsonl``. A
file is continued only with the same settings, so that it never mixes models.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

log = logging.getLogger(__name__)


class JSONLWriter:
    """Appends JSON lines to a new or interrupted file, whose parent folders are created.

    Example::

        with JSONLWriter("samples.jsonl", {"model": "Qwen/Qwen3-0.6B"}, group=8) as writer:
            for prompt in prompts[writer.done // 8 :]:
                writer.write(lines_of(prompt))

    ``settings`` determine the lines (plain JSON values). ``group`` lines belong together: an interrupted file is
    truncated after its last complete group. ``overwrite`` replaces an existing file. Raises ``FileExistsError`` if the
    file was not written by this class, ``ValueError`` if it was with other settings or has other lines.
    """

    def __init__(
        self, output: str | os.PathLike[str], settings: Mapping[str, Any], *, group: int = 1, overwrite: bool = False
    ) -> None:
        self.output = Path(output)
        self.settings_file = self.output.with_name(f"{self.output.name}.settings.json")
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # as they will be read back
        self.output.parent.mkdir(parents=True, exist_ok=True)
        if overwrite:
            self.output.unlink(missing_ok=True)
        if self.output.exists():
            self._check_settings()
        else:
            self.settings_file.write_text(json.dumps(self.settings, indent=2) + "\n")
        self._file = self.output.open("ab")
        self.done = self._truncate(group)
        """Number of lines in the file."""

    def _check_settings(self) -> None:
        """Raise unless the file was written with these settings."""
        cure = "choose another output, or start anew with overwrite"
        if not self.settings_file.exists():
            raise FileExistsError(f"{self.output} exists and has no {self.settings_file.name} beside it: {cure}")
        found = json.loads(self.settings_file.read_text())
        changed = [
            f"{name}: {found.get(name)!r} there, {self.settings.get(name)!r} now"
            for name in sorted({*found, *self.settings})
            if found.get(name) != self.settings.get(name)
        ]
        if changed:
            raise ValueError(f"{self.output} was written with other settings ({'; '.join(changed)}): {cure}")

    def _check_line(self, number: int, line: bytes) -> None:
        """Raise ValueError unless a whole line is one that :meth:`write` may have written."""
        try:
            written = isinstance(json.loads(line), dict)
        except ValueError:
            written = False
        if not written:
            raise ValueError(
                f"line {number} of {self.output} is no line of an output ({line[:60]!r}), so it cannot be continued: "
                "choose another output, or start anew with overwrite"
            )

    def _truncate(self, group: int) -> int:
        """Truncate the file after its last complete group, and return the number of lines kept."""
        kept = end = position = 0
        with self.output.open("rb") as file:
            for count, line in enumerate(file, start=1):
                position += len(line)
                if line.endswith(b"\n"):
                    self._check_line(count, line)
                if line.endswith(b"\n") and count % group == 0:
                    kept, end = count, position
        if end < position:
            log.warning("%s: %d bytes of an unfinished batch are cut off", self.output, position - end)
            self._file.truncate(end)
        return kept

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines and flush them; values that JSON cannot represent become text, NaN and infinities null."""
        text = "".join(json.dumps(_finite(line), ensure_ascii=False, default=str) + "\n" for line in lines)
        self._file.write(text.encode())
        self._file.flush()

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(entry) for name, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def weights_stamp(model: str) -> list[list[Any]]:
    """Size and modification time of a folder's weight files, to notice changed weights; empty for hub names."""
    files = sorted(path for path in Path(model).expanduser().glob("*") if path.suffix in (".safetensors", ".bin"))
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


@contextmanager
def progress_bar(
    title: str, total: int, *, done: int = 0, unit: str, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error while the context lasts; yield a function that advances it by a count."""
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


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a JSON lines file."""
    with Path(path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
