"""Atomic checkpoint directories: written under a temporary name, checksummed, renamed, verified before use."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhfkit.checkpoints.cleanup import OWNER, partial_path, write_owner
from rlhfkit.checkpoints.errors import MANIFEST, CheckpointError, DamagedCheckpointError, missing_checkpoint
from rlhfkit.checkpoints.files import sync_directory

_FORMAT = 1


def temporary_path(path: Path) -> Path:
    """Return the path under which a checkpoint is written before it is complete."""
    return path.with_name(path.name + ".tmp")


def backup_path(path: Path) -> Path:
    """Return the path of an existing checkpoint while a new one of the same name replaces it."""
    return path.with_name(path.name + ".old")


def create_temporary(path: Path) -> Path:
    """Create an empty temporary directory for ``path``; remove that of an interrupted save."""
    folder = temporary_path(path)
    remove(folder)
    fresh = partial_path(path)  # its name contains the owner, until the owner file exists
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_owner(fresh)
    os.rename(fresh, folder)
    return folder


def list_files(folder: Path) -> list[str]:
    """Return the sorted relative paths of all files of a checkpoint except the manifest."""
    found = (file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in found if name not in (MANIFEST, OWNER))


def sync_and_hash(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Force files to disk; return their sizes and SHA-256 digests by name."""
    records = {}
    for name in names:
        with open(folder / name, "rb") as stream:
            os.fsync(stream.fileno())
            records[name] = {
                "size": os.fstat(stream.fileno()).st_size,
                "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
            }
    return records


def commit(path: Path, records: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write the manifest and rename the temporary directory to ``path``.

    A process killed at any moment leaves a complete checkpoint under ``path`` or, if one was being replaced, under
    ``backup_path(path)``.
    """
    folder = temporary_path(path)
    manifest = {"format": _FORMAT, **about, "files": dict(sorted(records.items()))}
    with open(folder / MANIFEST, "w") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for directory in (*(d for d in folder.rglob("*") if d.is_dir()), folder):
        sync_directory(directory)
    old = backup_path(path)
    if path.exists():
        remove(old)
        os.rename(path, old)
    os.rename(folder, path)
    (path / OWNER).unlink(missing_ok=True)  # last: without it, the folder of a process killed before has no owner
    sync_directory(path.parent)
    remove(old)


def remove(path: Path) -> None:
    """Delete a checkpoint: rename it first, so that a kill in between leaves no incomplete checkpoint of that name."""
    if path.is_dir():
        doomed = path.with_name(path.name + ".deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    elif path.exists():
        path.unlink()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint directory and check the types of its entries.

    Raises:
        DamagedCheckpointError: If it is missing beside files of a checkpoint, or its content is wrong.
        CheckpointError: If there is no checkpoint of this strategy, or one of another format version.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, not a checkpoint directory of RLHFDeepSpeedStrategy; resume it with the strategy that"
            " wrote it."
        )
    if not path.exists():
        raise missing_checkpoint(path)
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
    """Check a checkpoint against its manifest, which is returned; without ``checksums`` compare sizes only.

    Raises:
        DamagedCheckpointError: Naming the first file that is missing, of the wrong size, or changed.
        CheckpointError: If it is no checkpoint of this strategy.
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
    """Return checkpoints to load instead of ``path``: its backup, then others in its folder, newest first.

    If the manifest of ``path`` can be read, checkpoints saved after it are left out.
    """
    limit = float("inf")
    with contextlib.suppress(CheckpointError):
        limit = read_manifest(path)["saved_at"]
    siblings = []
    for folder in path.parent.iterdir() if path.parent.is_dir() else ():
        if folder.resolve() in (path.resolve(), backup_path(path).resolve()) or not (folder / MANIFEST).is_file():
            continue
        if folder.name.endswith((".tmp", ".deleted")):
            continue
        try:
            saved_at = read_manifest(folder)["saved_at"]
        except CheckpointError:
            continue
        if saved_at < limit:
            siblings.append((saved_at, folder))
    backup = [backup_path(path)] if backup_path(path).is_dir() else []
    return backup + [folder for _, folder in sorted(siblings, reverse=True)]


def find_intact(path: Path) -> tuple[Path, list[str]]:
    """Return the checkpoint, or if it is damaged the newest intact older one, and why others were not used.

    If only a backup of the path exists, a run was killed between the two renames of :func:`commit`; the backup is used.
    Raises CheckpointError if the path is missing or no checkpoint, or no intact one is found.
    """
    reasons: list[str] = []
    if path.exists() or not backup_path(path).is_dir():
        try:
            verify(path)
            return path, reasons
        except DamagedCheckpointError as error:
            reasons.append(str(error))
    else:
        reasons.append(f"{path} was being replaced when its run was killed.")
    for candidate in older_checkpoints(path):
        try:
            verify(candidate)
            return candidate, reasons
        except CheckpointError as error:
            reasons.append(str(error))
    raise CheckpointError("There is no intact checkpoint to load. " + " ".join(reasons))


def lost_steps(wanted: Path, found: Path) -> str:
    """Return a sentence about the optimizer steps lost by loading ``found`` instead of the damaged ``wanted``."""
    here = read_manifest(found)["global_step"]
    there = None
    with contextlib.suppress(CheckpointError):
        there = read_manifest(wanted)["global_step"]
    if here is None or there is None:
        return f"It is of optimizer step {here}; how many steps are lost is not known."
    return f"{there - here} optimizer steps are lost: it is of step {here}, not of step {there}."
