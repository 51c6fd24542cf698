"""Linux namespaces: process ids, a view of files, and a network of one's own.

They are there for root with CAP_SYS_ADMIN, and for other users where the kernel gives them user namespaces. Imported in
guard and worker as part of a package that brings nothing else; standard library only.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NOSUID_NODEV, _BIND, _REC, _PRIVATE = 6, 0x1000, 0x4000, 1 << 18
_SET_CHILD_SUBREAPER = 36
_MOUNT_SETATTR = 442  # the same number on every architecture; glibc has had a wrapper since 2.36 only
_READ_ONLY, _RECURSIVE, _HERE, _DETACH = 1, 0x8000, -100, 2
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents have ended, in place of the machine's first process."""
    if sys.platform == "linux":
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def separate() -> bool:
    """Give the caller's next child process ids of its own, as process 1, whose end is the end of all of them.

    Returns:
        Whether the kernel allowed it. A user other than root also gets a user namespace, in which it may do the rest.
    """
    if sys.platform != "linux":
        return False
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
    call(_libc.unshare, _NEWPID if user == 0 else _NEWUSER | _NEWPID)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def no_network() -> None:
    """Leave it.

    Raises:
        OSError: If the kernel does not allow it.
    """
    call(_libc.unshare, _NEWNET)


def enter(folder: str, size: int, user: int, view: Sequence[str] | None) -> list[str]:
    """Files of one's own around process 1 of new process ids.

    Args:
        folder: The only place, with shared memory, that can be written; in memory.
        size: Bytes that each of the two holds.
        user: Their owner.
        view: All that can be read; ``None``: everything, read-only.

    Returns:
        Walls that stand: ``"processes"``, and where mounts are allowed ``"files"`` and, with a view, ``"data"``.
    """
    walls = []
    try:
        call(_libc.unshare, _NEWNS | _NEWIPC)
        _mount("none", "/", None, _REC | _PRIVATE)
        if view is None:
            _everything_read_only(folder, size, user)
        else:
            _only(view, folder, size, user)
            walls = ["data"]
        walls.append("files")
    except (OSError, AttributeError):
        walls = []
    # Without a /proc of our own, the machine's shows the memory of processes that have no id here.
    hidden = os.path.realpath("/proc/self") == f"/proc/{os.getpid()}" or not os.listdir("/proc")
    return [*walls, "processes"] if hidden else walls


def _everything_read_only(folder: str, size: int, user: int) -> None:
    _read_only("/", _RECURSIVE)
    for target in (folder, "/dev/shm"):
        if os.path.isdir(target):
            _mount("tmpfs", target, "tmpfs", _NOSUID_NODEV, f"size={size},mode=0700,uid={user}")
    _own_processes("/proc")


def _only(view: Sequence[str], folder: str, size: int, user: int) -> None:
    """A new root that has only what is in the view; the old one is let go."""
    root = folder  # it is put together where the folder is, and has a folder of that name inside
    _mount("tmpfs", root, "tmpfs", _NOSUID_NODEV, "mode=0755,size=1048576")
    for path in view:
        _show(path, root + path)
    for name in _DEVICES:
        _show(f"/dev/{name}", f"{root}/dev/{name}")
    for target in (folder, "/dev/shm"):
        os.makedirs(root + target, exist_ok=True)
        _mount("tmpfs", root + target, "tmpfs", _NOSUID_NODEV, f"size={size},mode=0700,uid={user}")
    os.makedirs(root + "/proc", exist_ok=True)
    _own_processes(root + "/proc")
    os.makedirs(root + "/tmp", exist_ok=True)
    _read_only(root, 0)
    os.chdir(root)
    call(_libc.pivot_root, b".", b".")
    call(_libc.umount2, b".", _DETACH)
    os.chdir("/")


def _show(path: str, target: str) -> None:
    """A file, folder or link of the old root in the new one, read-only."""
    if not os.path.lexists(path) or os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, _BIND | _REC)
    if not path.startswith("/dev/"):  # whose files can be written by everybody
        _read_only(target, _RECURSIVE)


def _own_processes(target: str) -> None:
    try:
        _mount("proc", target, "proc", _NOSUID_NODEV)
    except OSError:  # refused inside containers that hide parts of theirs
        return


def _read_only(path: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    call(_libc.syscall, ctypes.c_long(_MOUNT_SETATTR), _HERE, path.encode(), flags, attributes, len(attributes))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = None if kind is None else kind.encode()
    call(_libc.mount, source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode())


def call(function: Callable[..., int], *arguments: Any) -> None:
    """Call a C function.

    Args:
        function: Returns 0 where it succeeds.
        arguments: Its.

    Raises:
        OSError: Where it fails.
    """
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
