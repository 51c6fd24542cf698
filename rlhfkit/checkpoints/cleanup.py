"""Remove unfinished checkpoints of killed processes, but not those that other runs are writing."""

import contextlib
import json
import os
import re
import shutil
import socket
import time
import zipfile
from pathlib import Path

from rlhfkit.checkpoints.errors import MANIFEST

OWNER = "owner.json"
"""File in a checkpoint that is being written, with the machine and process that write it."""

MODULE_FOLDER = "module"
"""Folder in a checkpoint with what the module saves by itself, such as the checkpoint of a critic elsewhere."""

_ABANDONED = 86400.0
"""Seconds without a change after which unfinished work of another machine counts as abandoned."""

_ENGINE_FILE = re.compile(r"checkpoint|latest|zero_to_\w+\.py")
"""What DeepSpeed 0.19.8 writes into the folder of an engine: shards, and scripts that convert them."""

_RANK_FILE = re.compile(r"rank_\d{5}\.pt")
_PARTIAL_FILE = re.compile(r"\.(?P<host>[^.]+)-(?P<pid>\d+)\.tmp$")


def partial_path(path: Path) -> Path:
    """Return a temporary path for a file or folder, whose name contains this machine and process."""
    return path.with_name(f"{path.name}.{_host()}-{os.getpid()}.tmp")


def write_owner(folder: Path) -> None:
    """Write :data:`OWNER` with this machine and process into a folder."""
    (folder / OWNER).write_text(json.dumps({"host": _host(), "pid": os.getpid()}))


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove and return unfinished checkpoints of ended processes, and checkpoints whose deletion was interrupted.

    Whether a process of another machine still runs is unknown; its unfinished work is removed when it is a day old.
    """
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # another process removes it too
            if _is_removable(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                removed.append(path)
    return removed


def _is_removable(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        if path.name.endswith(".deleted"):
            return _is_checkpoint_folder(path)
        if path.name.endswith(".old"):  # its replacement is complete, but its process was killed before deleting it
            return (path.with_name(path.name.removesuffix(".old")) / MANIFEST).is_file() and _is_checkpoint_folder(path)
        owner = _owner_by_name(path) or _owner(path)
        ours = owner is not None or _is_checkpoint_folder(path)
        return path.name.endswith(".tmp") and ours and _is_abandoned(path, owner)
    by_name = _owner_by_name(path)
    return by_name is not None and _is_abandoned(path, by_name)


def _owner_by_name(path: Path) -> tuple[str, int] | None:
    found = _PARTIAL_FILE.search(path.name)
    return None if found is None else (found["host"], int(found["pid"]))


def _is_checkpoint_folder(folder: Path) -> bool:
    """Whether a folder, possibly partly deleted, has only files of a checkpoint."""
    return all(
        entry.name in (MANIFEST, OWNER)
        or _RANK_FILE.fullmatch(entry.name)
        or (
            entry.is_dir() and (_is_engine_folder(entry) or (entry.name == MODULE_FOLDER and _holds_checkpoints(entry)))
        )
        for entry in folder.iterdir()
    )


def _is_engine_folder(folder: Path) -> bool:
    return all(map(_ENGINE_FILE.fullmatch, os.listdir(folder)))


def _holds_checkpoints(folder: Path) -> bool:
    """Whether a folder has only checkpoints, such as that of a critic with ranks of its own."""
    return all(
        _is_checkpoint_folder(entry) if entry.is_dir() else zipfile.is_zipfile(entry) for entry in folder.iterdir()
    )


def _owner(folder: Path) -> tuple[str, int] | None:
    try:
        owner = json.loads((folder / OWNER).read_text())
        return str(owner["host"]), int(owner["pid"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_abandoned(path: Path, owner: tuple[str, int] | None) -> bool:
    if owner is not None and owner[0] == _host():
        return owner[1] == os.getpid() or not _is_alive(owner[1])
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return time.time() - max(file.stat().st_mtime for file in files) > _ABANDONED


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _host() -> str:
    """Name of this machine and, on Linux, its process namespace: containers number their processes independently."""
    name = socket.gethostname().replace(".", "_").replace("-", "_")
    with contextlib.suppress(OSError):
        name += f"_{os.stat('/proc/self/ns/pid').st_ino}"
    return name
