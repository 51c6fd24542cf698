"""Checkpoint directories that are whole or not there: written aside, checksummed, renamed; verified before use."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhfkit.checkpoints.cleanup import OWNER, mark_as_ours, partial_file
from rlhfkit.checkpoints.errors import MANIFEST, CheckpointError, DamagedCheckpointError, missing
from rlhfkit.checkpoints.files import sync_directory

_FORMAT = 1


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(path.name + ".tmp")


def replaced(path: Path) -> Path:
    """Where an existing checkpoint waits while its successor of the same name takes its place."""
    return path.with_name(path.name + ".old")


def start(path: Path) -> Path:
    """An empty temporary directory for ``path``; what an interrupted save has left is removed."""
    folder = temporary(path)
    remove(folder)
    fresh = partial_file(path)  # whose name says whose it is, until a file in it does
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    mark_as_ours(fresh)
    os.rename(fresh, folder)
    return folder


def files_in(folder: Path) -> list[str]:
    """Relative paths of all files of a checkpoint below ``folder`` but the manifest, sorted."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in found if name not in (MANIFEST, OWNER))


def seal(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Force files to disk and record their size and SHA-256."""
    records = {}
    for name in names:
        with open(folder / name, "rb") as stream:
            os.fsync(stream.fileno())
            records[name] = {
                "size": os.fstat(stream.fileno()).st_size,
                "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
            }
    return records


def publish(path: Path, records: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write the manifest and rename the temporary directory to ``path``.

    Killed at any moment, there is a complete checkpoint under ``path`` or, when one is being replaced, under
    ``replaced(path)``.
    """
    folder = temporary(path)
    manifest = {"format": _FORMAT, **about, "files": dict(sorted(records.items()))}
    with open(folder / MANIFEST, "w") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for directory in (*(d for d in folder.rglob("*") if d.is_dir()), folder):
        sync_directory(directory)
    old = replaced(path)
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(folder, path)
    (path / OWNER).unlink(missing_ok=True)  # not before: a kill in between would leave a folder of nobody's
    sync_directory(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint; it disappears under its name before its files go."""
    if path.is_dir():
        doomed = path.with_name(path.name + ".deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    elif path.exists():
        path.unlink()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint directory; every entry has its type.

    Raises:
        DamagedCheckpointError: When it is missing beside files of a checkpoint, or its content is wrong.
        CheckpointError: When there is no checkpoint directory of ours, or one of another version.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, not a checkpoint directory of RLHFDeepSpeedStrategy; resume it with the strategy that"
            " wrote it."
        )
    if not path.exists():
        raise missing(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        if any(path.glob("rank_*.pt")):
            raise DamagedCheckpointError(f"{path} has no {MANIFEST}, though it has files of ranks.") from None
        raise CheckpointError(f"{path} has no {MANIFEST}: it was not written by RLHFDeepSpeedStrategy.") from None
    except (ValueError, OSError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise DamagedCheckpointError(f"{path / MANIFEST} cannot be read: it is no object with a format.")
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']!r}; this version reads {_FORMAT}.")
    wrong = [name for name, fits in _ENTRIES.items() if not fits(manifest.get(name))]
    if wrong:
        raise DamagedCheckpointError(
            f"{path / MANIFEST} cannot be read: {', '.join(wrong)} missing or of a wrong type."
        )
    return manifest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("size")) and isinstance(value.get("sha256"), str)


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "saved_at": lambda value: isinstance(value, int | float),
    "world_size": lambda value: _is_count(value) and value > 0,
    "global_step": lambda value: value is None or _is_count(value),
    "engines": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "files": lambda value: isinstance(value, dict) and all(map(_is_record, value.values())),
}


def verify(path: Path, *, checksums: bool = True) -> dict[str, Any]:
    """Check a checkpoint against its manifest.

    Args:
        path: Checkpoint directory.
        checksums: Whether to read every file; otherwise only sizes are compared.

    Returns:
        The manifest.

    Raises:
        DamagedCheckpointError: Naming the first file that is missing, of the wrong size, or changed.
        CheckpointError: When it is no checkpoint of ours.
    """
    manifest = read_manifest(path)
    for name, record in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise DamagedCheckpointError(f"{path}: the file {name} is missing.")
        if file.stat().st_size != record["size"]:
            raise DamagedCheckpointError(f"{path}: {name} has {file.stat().st_size} bytes, not {record['size']}.")
        if checksums:
            with open(file, "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != record["sha256"]:
                    raise DamagedCheckpointError(f"{path}: the contents of {name} have changed (SHA-256 differs).")
    return manifest


def older_checkpoints(path: Path) -> list[Path]:
    """Checkpoints to fall back to when ``path`` is unusable: its replaced namesake, then siblings, newest first.

    When ``path`` still has a readable manifest, siblings saved after it are left out.
    """
    limit = float("inf")
    with contextlib.suppress(CheckpointError):
        limit = read_manifest(path)["saved_at"]
    siblings = []
    for folder in path.parent.iterdir() if path.parent.is_dir() else ():
        if folder.resolve() in (path.resolve(), replaced(path).resolve()) or not (folder / MANIFEST).is_file():
            continue
        if folder.name.endswith((".tmp", ".deleted")):
            continue
        try:
            saved_at = read_manifest(folder)["saved_at"]
        except CheckpointError:
            continue
        if saved_at < limit:
            siblings.append((saved_at, folder))
    namesake = [replaced(path)] if replaced(path).is_dir() else []
    return namesake + [folder for _, folder in sorted(siblings, reverse=True)]


def usable(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint itself when it is intact, the newest older intact one when it is damaged.

    Nothing else is a reason to take another one: a path that is not there or not ours is an error. Of a name whose
    replacement was killed between two renames, the replaced checkpoint is still there and is taken.

    Returns:
        The path to load and the complaints about those passed over.

    Raises:
        CheckpointError: When the path is no checkpoint, or nothing intact is found.
    """
    complaints: list[str] = []
    if path.exists() or not replaced(path).is_dir():
        try:
            verify(path)
            return path, complaints
        except DamagedCheckpointError as error:
            complaints.append(str(error))
    else:
        complaints.append(f"{path} was being replaced when its run was killed.")
    for candidate in older_checkpoints(path):
        try:
            verify(candidate)
            return candidate, complaints
        except CheckpointError as error:
            complaints.append(str(error))
    raise CheckpointError("There is no intact checkpoint to load. " + " ".join(complaints))


def lost_steps(wanted: Path, found: Path) -> str:
    """What it costs to load one checkpoint in place of another, as a sentence.

    Args:
        wanted: The damaged one.
        found: The intact one.
    """
    here = read_manifest(found)["global_step"]
    there = None
    with contextlib.suppress(CheckpointError):
        there = read_manifest(wanted)["global_step"]
    if here is None or there is None:
        return f"It is of optimizer step {here}; how many steps are lost is not known."
    return f"{there - here} optimizer steps are lost: it is of step {here}, not of step {there}."
