"""Walls around a process: resource limits everywhere, namespaces and an own user where Linux lets us.

Loaded by path in the child processes of :mod:`rlhfkit.rewards.sandbox`; imports the standard library only.

What holds depends on the machine, so each wall is tried, and what stands is reported. None of it is meant to hold a
determined attacker: that takes a container or a virtual machine.

==================  ========================================================================================
always              address space, open files, file size, no core dumps, first to go when memory runs out
Linux               no new privileges, whole process tree killed, memory of all processes together
as root             a user of its own, so nothing of ours can be written, signalled or traced
with namespaces     own process ids (one kill ends all), read-only files, own folder of limited size, no network
==================  ========================================================================================

Namespaces are there for root with CAP_SYS_ADMIN, and for other users where the kernel gives them user namespaces.
"""

import ctypes
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID_NODEV, _MS_REC, _MS_PRIVATE = 6, 0x4000, 1 << 18
_SET_DUMPABLE, _SET_KEEPCAPS, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _SET_PDEATHSIG = (
    4,
    8,
    36,
    38,
    47,
    1,
)
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_MOUNT_SETATTR = 442  # the same number on every architecture; glibc has had a wrapper since 2.36 only
_FIRST_USER = 1_900_000_000  # above what systemd gives to containers and services

_libc = ctypes.CDLL(None, use_errno=True)


def separate() -> bool:
    """Give the caller's next child process ids of its own, as process 1, whose end is the end of all of them.

    Returns:
        Whether the kernel allowed it. A user other than root also gets a user namespace, in which it may do the rest.
    """
    if sys.platform != "linux":
        return False
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # grandchildren whose parents end become ours, not init's
    probe = os.fork()
    if probe == 0:  # a failure half way would leave us nobody; so somebody else goes first
        try:
            _new_process_ids()
            os._exit(0)
        except OSError:
            os._exit(1)
    if os.waitpid(probe, 0)[1] != 0:
        return False
    _new_process_ids()
    return True


def _new_process_ids() -> None:
    user, group = os.geteuid(), os.getegid()
    _call(_libc.unshare, _NEWPID if user == 0 else _NEWUSER | _NEWPID)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def confine(limits: dict[str, Any], folder: str, *, separated: bool, readable: Iterable[str] = ()) -> list[str]:
    """Put up the walls around this process and all it will start. There is no way back.

    Args:
        limits: The fields of :class:`~rlhfkit.rewards.sandbox.Limits`.
        folder: Where it may write; becomes the working directory.
        separated: What :func:`separate` returned in the parent.
        readable: Folders it must be able to read, such as those of its modules.

    Returns:
        Which walls stand beside the resource limits: ``"processes"``, ``"files"``, ``"network"``, ``"user"``.
    """
    linux, root = sys.platform == "linux", os.geteuid() == 0
    walls = ["processes"] if separated else []
    # /proc is still the machine's here: a number that no other running process has.
    user = _FIRST_USER + int(os.readlink("/proc/self")) if root and linux else os.geteuid()
    if linux:
        _allowed(Path("/proc/self/oom_score_adj").write_text, "1000")
    if separated:
        if _allowed(_own_files, folder, limits["file_mib"] << 20, user):
            walls.append("files")
        if not limits["network"] and _allowed(_call, _libc.unshare, _NEWNET):
            walls.append("network")
    _limit(resource.RLIMIT_AS, int(limits["memory_gib"] * 2**30))
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
    _limit(resource.RLIMIT_CORE, 0)
    if root and linux and _allowed(_become, user, folder, readable):
        walls.append("user")
    elif linux:
        _allowed(_keep_capabilities, 0)
    os.chdir(folder)
    os.umask(0o077)
    alone = "user" in walls or (separated and not root and _counts_by_namespace())
    _limit(resource.RLIMIT_NPROC, limits["processes"] + (0 if alone else _running_tasks()))
    if linux:
        _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # changing the user has switched it off, and with it /proc/self
        _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)
    return walls


def _own_files(folder: str, size: int, user: int) -> None:
    """Everything read-only, but for the folder and shared memory, which are in memory and of limited size."""
    _call(_libc.unshare, _NEWNS | _NEWIPC)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    read_only = struct.pack("QQQQ", 1, 0, 0, 0)
    recursive, here = 0x8000, -100
    _call(_libc.syscall, ctypes.c_long(_MOUNT_SETATTR), here, b"/", recursive, read_only, len(read_only))
    for target in (folder, "/dev/shm"):
        if os.path.isdir(target):
            _mount("tmpfs", target, "tmpfs", _MS_NOSUID_NODEV, f"size={size},mode=0700,uid={user}")
    _allowed(_mount, "proc", "/proc", "proc", _MS_NOSUID_NODEV)  # refused inside containers that hide parts of theirs


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    _allowed(resource.setrlimit, kind, (value, value))  # macOS has limits that cannot be set


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
    """Whether everybody may go to a file or into a folder; one that does not exist hinders nobody."""
    places = (place for place in (Path(path), *Path(path).parents) if place.exists())
    return all(place.stat().st_mode & stat.S_IXOTH for place in places)


def _permitted() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapPrm"))
    return int(line.split()[1], 16)


def _keep_capabilities(kept: int) -> None:
    """Drop all capabilities but these, which programs that are started inherit."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3: two times 32 bits
    _call(_libc.capset, header, struct.pack("IIIIII", kept, kept, kept, 0, 0, 0))
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


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = None if kind is None else kind.encode()
    _call(_libc.mount, source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode())


def _call(function: Callable[..., int], *arguments: Any) -> None:
    """Call a C function; OSError where it fails."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _allowed(step: Callable[..., object], *arguments: Any) -> bool:
    """Whether a step could be taken."""
    try:
        step(*arguments)
    except (OSError, ValueError, AttributeError):
        return False
    return True
