"""Isolation layers of a sandbox: their names, the command of bubblewrap, and the paths a program may read.

Loaded by the trainer and, by path, by the supervisor; standard library only.
"""

import glob
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ISOLATION_LAYERS = {
    "processes": "it sees no process but its own, and all of them end with the first",
    "writes": "it writes into its own folder only",
    "reads": "it reads the interpreter, the packages and the system's libraries only",
    "trainer": "it can neither look into the trainer (memory, environment, open files) nor signal it",
    "network": "it has no network",
    "memory": "it gets no memory that no limit counts (memfd, System V)",
    "user": "it is another user than the trainer",
}
"""Names of the layers, as in :attr:`SandboxPool.isolation`, and what each guarantees about the processes inside."""

_SYSTEM = (
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/nix/store", "/gnu/store", "/etc/alternatives",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
)  # fmt: skip


class InsufficientIsolationError(RuntimeError):
    """A layer is missing that the sandboxed code requires."""


def missing_isolation(name: str, required: Collection[str], active: Collection[str]) -> str:
    """Return a message that names the required layers that are not active; empty if all are."""
    missing = [layer for layer in required if layer not in active]
    if not missing:
        return ""
    stated = "; ".join(f"{layer} ({ISOLATION_LAYERS[layer]})" for layer in missing)
    return (
        f"{name}: this machine does not allow these isolation layers: {stated}. Run the trainer as root, install "
        "bubblewrap, use a kernel with Landlock (Linux 6.12), or accept a sandbox that hostile code can escape from "
        "with allow_partial_isolation=True. docs/security.md says what each machine provides"
    )


def readable_paths(files: Iterable[Path]) -> list[str]:
    """Return what a program needs to read, none inside another: system, interpreter, packages, ``files``."""
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


_ROOT_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN", "CAP_DAC_READ_SEARCH")
"""Capabilities that root needs to become another user."""


def bubblewrap_command(
    program: Sequence[str], folder: str, limits: dict[str, Any], readable: Sequence[str] | None, network: bool
) -> list[str]:
    """Return the command line that runs a program inside bubblewrap.

    ``folder`` is writable, a tmpfs; ``readable`` are the paths that the program may read (``None``: all).
    """
    words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += [] if network else ["--unshare-net"]
    if os.geteuid() == 0:
        words += ["--cap-drop", "ALL", *(word for one in _ROOT_CAPABILITIES for word in ("--cap-add", one))]
    above = {str(parent) for path in readable or () for parent in Path(path).parents if str(parent) != "/"}
    for path in sorted(above):  # bubblewrap would make them for root only
        words += ["--perms", "0755", "--dir", path]
    for path in ["/"] if readable is None else readable:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--ro-bind-try", path, path]
    words += ["--dev", "/dev"] if readable is not None else ["--dev-bind", "/dev", "/dev"]  # a reward may use a GPU
    words += ["--proc", "/proc", "--perms", "0755", "--dir", os.path.dirname(folder)]
    for mode, path in (("0700", folder), ("1777", "/dev/shm")):
        words += ["--perms", mode, "--size", str(limits["file_mib"] << 20), "--tmpfs", path]
    return [*words, "--chdir", "/", "--", *program]


@cache
def bubblewrap_works() -> bool:
    """Whether bubblewrap is installed and allowed to create the namespaces it needs."""
    if shutil.which("bwrap") is None:
        return False
    probe = bubblewrap_command(["true"], "/tmp", {"file_mib": 1}, None, network=False)
    try:
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
