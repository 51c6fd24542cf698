"""Confine a process: resource limits everywhere, and on Linux every isolation layer that the machine allows.

Each layer is tried, and those that are active are reported; ``docs/security.md`` lists them by machine, and a test
checks that table by attacks. Loaded in the worker as part of an otherwise empty package; standard library only.
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
    pid_namespace: bool,
    existing: Sequence[str] = (),
    readable: Iterable[str] = (),
    readable_paths: Sequence[str] | None = None,
) -> list[str]:
    """Confine this process and all it will start, irrevocably, and return the active layers besides resource limits.

    ``folder`` is the writable one and becomes the working directory. Root switches to the id ``user``, for which the
    folders ``readable``, such as those of modules, stay readable. ``existing`` layers are set up already. Untrusted
    code may read ``readable_paths`` only (``None``: what the trainer can).
    """
    linux, root = sys.platform == "linux", os.geteuid() == 0
    layers = [*existing]
    if pid_namespace and "processes" not in layers:
        layers += namespaces.isolate_filesystem(
            folder, limits["file_mib"] << 20, user if root else os.geteuid(), readable_paths
        )
        if not limits["network"] and succeeds(namespaces.isolate_network):
            layers.append("network")
    if linux:
        succeeds(Path("/proc/self/oom_score_adj").write_text, "1000")
    _set_limit(resource.RLIMIT_AS, int(limits["memory_gib"] * 2**30))
    _set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _set_limit(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
    _set_limit(resource.RLIMIT_CORE, 0)
    rules = (
        _landlock_rules(readable_paths, folder)
        if linux and readable_paths is not None and "reads" not in layers
        else None
    )
    if root and linux and succeeds(_drop_root, user, folder, readable if readable_paths is None else readable_paths):
        layers.append("user")
    elif linux:
        succeeds(_set_capabilities, 0)
    os.chdir(folder)
    os.umask(0o077)
    alone = "user" in layers or (pid_namespace and not root and _counted_per_namespace())
    _set_limit(resource.RLIMIT_NPROC, limits["processes"] + (0 if alone else _running_tasks()))
    if linux:
        _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # switched off, with /proc/self, by the change of user
        _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)
        if rules is not None and succeeds(rules.enforce):
            layers += ["writes", "reads", *(["trainer"] if rules.signals else [])]
        layers += _filter_system_calls(layers, network=limits["network"], trusted=readable_paths is None)
    if {"user", "processes"} & set(layers) and "trainer" not in layers:
        layers.append("trainer")
    return list(dict.fromkeys(layers))


def _landlock_rules(readable_paths: Sequence[str], folder: str) -> landlock.Rules | None:
    """Create the Landlock rules while all paths can still be opened; ``None`` without Landlock."""
    try:
        return landlock.Rules(readable_paths, [folder, *_DEVICES])
    except OSError:
        return None


def _filter_system_calls(layers: Sequence[str], *, network: bool, trusted: bool) -> list[str]:
    """Install a filter of system calls, and return the layers it provides."""
    groups = [seccomp.MEMORY_CALLS]
    if not trusted:
        groups.append(seccomp.CROSS_PROCESS_CALLS)
        if not network and "network" not in layers:
            groups.append(seccomp.NETWORK_CALLS)
    if not seccomp.install_filter(*groups, few_families=not network and "network" in layers):
        return []
    return ["memory", *(["network"] if seccomp.NETWORK_CALLS in groups else [])]


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    succeeds(resource.setrlimit, kind, (value, value))  # some limits of macOS cannot be set


def _drop_root(user: int, folder: str, readable: Iterable[str]) -> None:
    """Switch from root, to which the limit on processes does not apply, to a user without privileges.

    It keeps the one to read all files if the interpreter needs it.
    """
    paths = [sys.executable, os.path.realpath(sys.executable), os.path.dirname(folder), *readable]
    keep = 0 if all(map(_world_accessible, paths)) else 1 << _DAC_READ_SEARCH
    os.chown(folder, user, user)
    if keep and not _permitted_capabilities() & keep:
        keep = 1 << _DAC_OVERRIDE  # containers usually have this one only
    _libc.prctl(_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _set_capabilities(keep & _permitted_capabilities())


def _world_accessible(path: str) -> bool:
    """Whether every user may read a file or enter a folder; true if it does not exist."""
    place = Path(path)
    if not place.exists():
        return True
    wanted = stat.S_IXOTH if place.is_dir() else stat.S_IROTH
    return bool(place.stat().st_mode & wanted) and all(one.stat().st_mode & stat.S_IXOTH for one in place.parents)


def _permitted_capabilities() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm"))
    return int(line.split()[1], 16)


def _set_capabilities(kept: int) -> None:
    """Drop all capabilities but ``kept`` (a bit mask), which child processes inherit."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3: two times 32 bits
    namespaces.check_call(_libc.capset, header, struct.pack("IIIIII", kept, kept, kept, 0, 0, 0))
    _libc.prctl(_CAP_AMBIENT, 4, 0, 0, 0)
    for number in range(kept.bit_length()):
        if kept >> number & 1:
            _libc.prctl(_CAP_AMBIENT, 2, number, 0, 0)


def _counted_per_namespace() -> bool:
    """Whether Linux counts processes by user *and* user namespace (since 5.14)."""
    return tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2]) >= (5, 14)


def _running_tasks() -> int:
    """Number of this user's threads on the whole machine, which count towards the limit on processes."""
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


def succeeds(step: Callable[..., object], *arguments: Any) -> bool:
    """Call a function and return whether it worked."""
    try:
        step(*arguments)
    except (OSError, ValueError, AttributeError):
        return False
    return True
