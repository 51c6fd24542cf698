"""Checkpoint directories that are whole or not there: written aside, checksummed, renamed; verified before use."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return path.with_name(path.name + ".tmp")


def replaced(path: Path) -> Path:
    """Where an existing checkpoint waits while its successor of the same name takes its place."""
    return path.with_name(path.name + ".old")


def start(path: Path) -> Path:
    """An empty temporary directory for ``path``; what an interrupted save has left is removed."""
    folder = temporary(path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def files_in(folder: Path) -> list[str]:
    """Relative paths of all files below ``folder`` but the manifest, sorted."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in found if name != MANIFEST)


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
        _sync_directory(directory)
    old = replaced(path)
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(folder, path)
    _sync_directory(path.parent)
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
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: When there is none or it cannot be read.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, not a checkpoint directory of RLHFDeepSpeedStrategy; resume it with the strategy that"
            " wrote it."
        )
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: it was not written by RLHFDeepSpeedStrategy.") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}; this version reads {_FORMAT}.")
    return manifest


def verify(path: Path, *, checksums: bool = True) -> dict[str, Any]:
    """Check a checkpoint against its manifest.

    Args:
        path: Checkpoint directory.
        checksums: Whether to read every file; otherwise only sizes are compared.

    Returns:
        The manifest.

    Raises:
        CheckpointError: Naming the first file that is missing, of the wrong size, or changed.
    """
    manifest = read_manifest(path)
    for name, record in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: the file {name} is missing.")
        if file.stat().st_size != record["size"]:
            raise CheckpointError(f"{path}: {name} has {file.stat().st_size} bytes, not {record['size']}.")
        if checksums:
            with open(file, "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != record["sha256"]:
                    raise CheckpointError(f"{path}: the contents of {name} have changed (SHA-256 differs).")
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
    """The checkpoint itself when it is intact, otherwise the newest older one that is.

    Returns:
        The path to load and the complaints about those passed over.

    Raises:
        CheckpointError: When nothing intact is found. A path that was never a checkpoint of this format has no
            fallback.
    """
    complaints: list[str] = []
    try:
        verify(path)
        return path, complaints
    except CheckpointError as error:
        if path.is_file():
            raise
        complaints.append(str(error))
    for candidate in older_checkpoints(path):
        try:
            verify(candidate)
            return candidate, complaints
        except CheckpointError as error:
            complaints.append(str(error))
    raise CheckpointError("There is no intact checkpoint to load. " + " ".join(complaints))


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
