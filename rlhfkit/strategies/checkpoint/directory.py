"""Atomic checkpoint directories: written under a temporary name, then renamed; their manifests."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhfkit.checkpoints.files import (
    MANIFEST,
    MODULE_FOLDER,
    OWNER,
    CheckpointError,
    DamagedCheckpointError,
    missing_checkpoint,
    partial_path,
    sync_directory,
    write_owner,
)

_FORMAT = 3
_FILE_OF_RANK = re.compile(r"(?:^|/)(?:rank_|(?:[a-z0-9]+_)?zero_pp_rank_)(\d+)[._]")
"""``rank_00003.pt``, and DeepSpeed 0.19.8's ``zero_pp_rank_3_mp_rank_00_model_states.pt`` with or without a prefix."""


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


def rank_of_file(name: str) -> int | None:
    """Return the rank that wrote a file, by its name; ``None`` for files that all ranks have in common."""
    match = None if name.startswith(f"{MODULE_FOLDER}/") else _FILE_OF_RANK.search(name)
    return None if match is None else int(match[1])


def files_of_rank(folder: Path, rank: int) -> list[str]:
    """Return those of :func:`list_files` that a rank has written; rank 0 also writes the common ones."""
    return [name for name in list_files(folder) if (rank_of_file(name) or 0) == rank]


def share_of_rank(manifest: Mapping[str, Any], rank: int, world_size: int) -> list[str]:
    """Return the files of a checkpoint that a rank verifies; each belongs to exactly one of the ranks.

    If the checkpoint was saved by the same number of ranks, those that the rank itself wrote, which it loads next, and
    its part of the common files. Otherwise its part of all files. Large files come first, so that parts are similar.
    """
    same_ranks, dealt, share = manifest["world_size"] == world_size, 0, []
    for name in sorted(manifest["files"], key=lambda name: (-manifest["files"][name], name)):
        writer = rank_of_file(name) if same_ranks else None
        if (dealt % world_size if writer is None else writer) == rank:
            share.append(name)
        dealt += writer is None
    return share


def sync_files(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Force files to disk; return their sizes in bytes by name."""
    sizes = {}
    for name in names:
        with open(folder / name, "rb") as stream:
            os.fsync(stream.fileno())
            sizes[name] = os.fstat(stream.fileno()).st_size
    return sizes


def commit(path: Path, sizes: Mapping[str, int], about: Mapping[str, Any]) -> None:
    """Write the manifest, with the ``sizes`` of all files, and rename the temporary directory to ``path``.

    A process killed at any moment leaves a complete checkpoint under ``path`` or, if one was being replaced, under
    ``backup_path(path)``.
    """
    folder = temporary_path(path)
    manifest = {"format": _FORMAT, **about, "files": dict(sorted(sizes.items()))}
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
    """Delete a checkpoint: rename it first, so that a kill in between leaves no incomplete checkpoint of that name.

    The other name has the owner in it, by which the next start finds what is left
    (:func:`~rlhfkit.checkpoints.files.remove_abandoned`).
    """
    if path.is_dir():
        doomed = partial_path(path)
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


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "saved_at": lambda value: isinstance(value, int | float),
    "world_size": lambda value: _is_count(value) and value > 0,
    "global_step": lambda value: value is None or _is_count(value),
    "engines": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "files": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
}
