"""Atomic checkpoint directories: written under a temporary name, then renamed; their manifests."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhfkit.checkpoints.cleanup import OWNER, partial_path, write_owner
from rlhfkit.checkpoints.errors import MANIFEST, CheckpointError, DamagedCheckpointError, missing_checkpoint
from rlhfkit.checkpoints.files import sync_directory
from rlhfkit.strategies.checkpoint.hashing import CHUNK_BYTES, number_of_chunks, rank_of_file

_FORMAT = 2
_READABLE = (1, 2)
"""Format 1 has one checksum of each whole file, format 2 one of each chunk."""


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


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Return those of :func:`list_files` that a rank has written; rank 0 also writes the common ones."""
    return [name for name in list_files(folder) if rank_of_file(name) == rank]


def commit(path: Path, records: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write the manifest and rename the temporary directory to ``path``.

    A process killed at any moment leaves a complete checkpoint under ``path`` or, if one was being replaced, under
    ``backup_path(path)``.
    """
    folder = temporary_path(path)
    manifest = {"format": _FORMAT, "chunk_bytes": CHUNK_BYTES, **about, "files": dict(sorted(records.items()))}
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
    if manifest["format"] not in _READABLE:
        raise CheckpointError(f"{path} has format {manifest['format']!r}; this version reads 1 and 2.")
    wrong = [name for name, fits in _ENTRIES.items() if not fits(manifest.get(name))]
    if not wrong and not all(_has_checksums(record, manifest) for record in manifest["files"].values()):
        wrong = ["files"]
    if wrong:
        raise DamagedCheckpointError(
            f"{path / MANIFEST} cannot be read: {', '.join(wrong)} missing or of a wrong type."
        )
    return manifest


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_record(value: Any) -> bool:
    return isinstance(value, dict) and _is_count(value.get("size"))


def _has_checksums(record: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    digests, chunk_bytes = record.get("sha256"), manifest.get("chunk_bytes")
    if manifest["format"] == 1:
        return isinstance(digests, str)
    if chunk_bytes is None or not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        return False
    return len(digests) == number_of_chunks(record["size"], chunk_bytes)


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "saved_at": lambda value: isinstance(value, int | float),
    "world_size": lambda value: _is_count(value) and value > 0,
    "global_step": lambda value: value is None or _is_count(value),
    "engines": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "files": lambda value: isinstance(value, dict) and all(map(_is_record, value.values())),
    "chunk_bytes": lambda value: value is None or (_is_count(value) and value > 0),
}
