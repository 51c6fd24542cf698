"""Walls around a process: resource limits everywhere, and on Linux whatever the machine lets us put up.

Imported in the worker as part of a package that brings nothing else; standard library only.

Each wall is tried, and what stands is reported. ``docs/security.md`` has the table of what holds where, which a test
checks by attacking.
"""

import ctypes
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from . import landlock, namespaces, seccomp

_SET_DUMPABLE, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _SET_PDEATHSIG = 4, 8, 38, 47, 1
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def confine(
    limits: dict[str, Any],
    folder: str,
    *,
    user: int,
    separated: bool,
    standing: Sequence[str] = (),
    readable: Iterable[str] = (),
    view: Sequence[str] | None = None,
) -> list[str]:
    """Put up the walls around this process and all it will start. There is no way back.

    Args:
        limits: The fields of :class:`~rlhfkit.rewards.sandbox.Limits`.
        folder: Where it may write; becomes the working directory.
        user: What root becomes.
        separated: Whether it has process ids of its own.
        standing: Walls that somebody else has put up.
        readable: Folders it must be able to read, such as those of its modules.
        view: All that it may read, for code that is not trusted; ``None``: what the trainer can read.

    Returns:
        Which walls stand beside the resource limits, see :data:`rlhfkit.rewards.sandbox.isolation.WALLS`.
    """
    linux, root = sys.platform == "linux", os.geteuid() == 0
    walls = [*standing]
    if separated and "processes" not in walls:
        walls += namespaces.enter(folder, limits["file_mib"] << 20, user if root else os.geteuid(), view)
        if not limits["network"] and allowed(namespaces.no_network):
            walls.append("network")
    if linux:
        allowed(Path("/proc/self/oom_score_adj").write_text, "1000")
    _limit(resource.RLIMIT_AS, int(limits["memory_gib"] * 2**30))
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
    _limit(resource.RLIMIT_CORE, 0)
    rules = _rules(view, folder) if linux and view is not None and "data" not in walls else None
    if root and linux and allowed(_become, user, folder, readable if view is None else view):
        walls.append("user")
    elif linux:
        allowed(_keep_capabilities, 0)
    os.chdir(folder)
    os.umask(0o077)
    alone = "user" in walls or (separated and not root and _counts_by_namespace())
    _limit(resource.RLIMIT_NPROC, limits["processes"] + (0 if alone else _running_tasks()))
    if linux:
        _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # changing the user has switched it off, and with it /proc/self
        _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)
        if rules is not None and allowed(rules.enforce):
            walls += ["files", "data", *(["trainer"] if rules.signals else [])]
        walls += _refuse_calls(walls, network=limits["network"], trusted=view is None)
    if {"user", "processes"} & set(walls) and "trainer" not in walls:
        walls.append("trainer")
    return list(dict.fromkeys(walls))


def _rules(view: Sequence[str], folder: str) -> landlock.Rules | None:
    """Landlock's, made while everything can still be reached."""
    try:
        return landlock.Rules(view, [folder, *_DEVICES])
    except OSError:
        return None


def _refuse_calls(walls: Sequence[str], *, network: bool, trusted: bool) -> list[str]:
    """Walls that a filter of system calls makes."""
    groups = [seccomp.MEMORY]
    if not trusted:
        groups.append(seccomp.REACHING_OUT)
        if not network and "network" not in walls:
            groups.append(seccomp.NETWORK)
    if not seccomp.refuse(*groups):
        return []
    return ["memory", *(["network"] if seccomp.NETWORK in groups else [])]


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    allowed(resource.setrlimit, kind, (value, value))  # macOS has limits that cannot be set


def _become(user: int, folder: str, readable: Iterable[str]) -> None:
    """Another user than root, with no privilege, or with that of reading if our interpreter is not for everyone.

    As root, the kernel would not count processes.
    """
    paths = [sys.executable, os.path.realpath(sys.executable), os.path.dirname(folder), *readable]
    keep = 0 if all(map(_open_to_all, paths)) else 1 << _DAC_READ_SEARCH
    os.chown(folder, user, user)
    if keep and not _permitted() & keep:
        keep = 1 << _DAC_OVERRIDE  # what containers have instead
    _libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _keep_capabilities(keep & _permitted())


def _open_to_all(path: str) -> bool:
    """Whether everybody may read a file or go into a folder; one that does not exist hinders nobody."""
    place = Path(path)
    if not place.exists():
        return True
    wanted = stat.S_IXOTH if place.is_dir() else stat.S_IROTH
    return bool(place.stat().st_mode & wanted) and all(one.stat().st_mode & stat.S_IXOTH for one in place.parents)


def _permitted() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm"))
    return int(line.split()[1], 16)


def _keep_capabilities(kept: int) -> None:
    """Drop all capabilities but these, which programs that are started inherit."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3: two times 32 bits
    namespaces.call(_libc.capset, header, struct.pack("IIIIII", kept, kept, kept, 0, 0, 0))
    _libc.prctl(_CAP_AMBIENT, 4, 0, 0, 0)
    for number in range(kept.bit_length()):
        if kept >> number & 1:
            _libc.prctl(_CAP_AMBIENT, 2, number, 0, 0)


def _counts_by_namespace() -> bool:
    """Linux counts processes by user *and* user namespace since 5.14."""
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2]) >= (5, 14)


def _running_tasks() -> int:
    """Threads of our user on the whole machine, which the limit on processes counts too."""
    if not os.path.isdir("/proc/self/task"):
        return int(os.popen(f"ps -u {os.getuid()} | wc -l").read() or 0)
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has just ended
            continue
    return total


def allowed(step: Callable[..., object], *arguments: Any) -> bool:
    """Whether a step could be taken.

    Args:
        step: What to do.
        arguments: Its.
    """
    try:
        step(*arguments)
    except (OSError, ValueError, AttributeError):
        return False
    return True
