"""What killed processes leave beside checkpoints, and how the next run tells it from another run's work."""

import contextlib
import json
import os
import re
import shutil
import socket
import time
from pathlib import Path

from rlhfkit.checkpoints.errors import MANIFEST

OWNER = "owner.json"
"""File in a checkpoint that is being written: which process writes it. Not part of a complete one."""

_ABANDONED = 86400.0
"""Seconds without a change after which work of a process on another machine is taken for a leftover."""

_OF_AN_ENGINE = re.compile(r"checkpoint|latest|zero_to_\w+\.py")
"""What DeepSpeed 0.19.8 writes into the folder of an engine: shards under our tag, and scripts that convert them."""

_RANK_FILE = re.compile(r"rank_\d{5}\.pt")
_PARTIAL_FILE = re.compile(r"\.(?P<host>[^.]+)-(?P<pid>\d+)\.tmp$")


def partial_file(path: Path) -> Path:
    """Where this process writes a file, or begins a folder, before it has its name."""
    return path.with_name(f"{path.name}.{_host()}-{os.getpid()}.tmp")


def mark_as_ours(folder: Path) -> None:
    """Note in a folder that is being written which process writes it."""
    (folder / OWNER).write_text(json.dumps({"host": _host(), "pid": os.getpid()}))


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove unfinished and half-deleted checkpoints of processes that are no more.

    Other runs may be using the folder: what they write stays. What was being deleted is deleted, whoever began. A
    process of another machine cannot be asked, so its unfinished work stays until it is a day old.

    Args:
        folder: That holds checkpoints; it may be missing.

    Returns:
        What was removed.
    """
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # another process removes it too
            if _is_leftover(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                removed.append(path)
    return removed


def _is_leftover(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.is_dir():
        if path.name.endswith(".deleted"):
            return _is_checkpoint_folder(path)
        if path.name.endswith(".old"):  # its successor took its place, but was killed before deleting it
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
    """Whether all that is in it is ours: also when part of it has been deleted."""
    return all(
        entry.name in (MANIFEST, OWNER)
        or _RANK_FILE.fullmatch(entry.name)
        or (entry.is_dir() and all(map(_OF_AN_ENGINE.fullmatch, os.listdir(entry))))
        for entry in folder.iterdir()
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
    """This machine, and on Linux the container: process numbers of two containers are not the same."""
    name = socket.gethostname().replace(".", "_").replace("-", "_")
    with contextlib.suppress(OSError):
        name += f"_{os.stat('/proc/self/ns/pid').st_ino}"
    return name
