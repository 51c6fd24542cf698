"""What may stand around a sandbox, what it takes, and what is missing where."""

import glob
import os
import sys
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal, get_args

from rlhfkit.rewards.sandbox import bubblewrap

Backend = Literal["auto", "bubblewrap", "namespaces"]
"""Who puts the walls up: ``auto`` is bubblewrap where it is installed and allowed, else ``namespaces``, our own."""

WALLS = {
    "processes": "it sees no process but its own, and all of them end with the first",
    "files": "it writes into its own folder only",
    "data": "it reads the interpreter, the packages and the system's libraries only",
    "trainer": "it can neither look into the trainer (memory, environment, open files) nor signal it",
    "network": "it has no network",
    "memory": "it gets no memory that no limit counts (memfd, System V)",
    "user": "it is another user than the trainer",
}
"""Names of walls, as :attr:`Sandbox.walls` has them, and what each says of the process inside."""

_SYSTEM = (
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/nix/store", "/gnu/store", "/etc/alternatives",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
)  # fmt: skip


class WeakSandbox(RuntimeError):
    """Walls are missing that the code inside must not do without."""


def require(name: str, required: Collection[str], standing: Collection[str]) -> str:
    """Which walls are missing, in words; empty if all stand.

    Args:
        name: What is run.
        required: Names.
        standing: Those that could be put up.
    """
    missing = [wall for wall in required if wall not in standing]
    if not missing:
        return ""
    stated = "; ".join(f"{wall} ({WALLS[wall]})" for wall in missing)
    return (
        f"{name}: this machine does not let us put up these walls: {stated}. Run the trainer as root or where user "
        "namespaces or Landlock (Linux 6.12) are allowed, or accept a sandbox that hostile code can leave with "
        "allow_weak=True. docs/security.md says what holds where"
    )


def chosen_backend(backend: Backend) -> Literal["bubblewrap", "namespaces"]:
    """Who puts up the walls on this machine.

    Args:
        backend: What was asked for.

    Raises:
        ValueError: If it is no backend.
        RuntimeError: If bubblewrap is asked for and cannot be used.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    if backend == "bubblewrap" and not bubblewrap.works():
        raise RuntimeError(
            "backend='bubblewrap': there is no bwrap on the PATH, or it is not allowed to make namespaces here; "
            "install the package bubblewrap, or use backend='auto'"
        )
    return "bubblewrap" if backend != "namespaces" and bubblewrap.works() else "namespaces"


def view(files: Iterable[Path]) -> list[str]:
    """What a program needs to read: the system's libraries, the interpreter, its packages.

    Args:
        files: And these.

    Returns:
        Paths, none inside another.
    """
    own = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    own += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *map(str, files)]
    linked = Path(sys.executable)
    while linked.is_symlink():  # each of the links has to be there
        linked = linked.parent / os.readlink(linked)
        own.append(str(linked))
    own += [os.path.realpath(path) for path in own]
    found = {os.path.abspath(path) for path in own if os.path.exists(path)} - {"/"}
    found |= {path for path in _SYSTEM if os.path.lexists(path)} | set(glob.glob("/lib*"))
    folders = tuple(f"{path}/" for path in found if not os.path.islink(path))
    return sorted(path for path in found if not path.startswith(folders))
