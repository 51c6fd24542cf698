"""Linux namespaces: process ids, file system and network of a process's own.

Available to root with CAP_SYS_ADMIN, and to other users where the kernel allows user namespaces. Loaded in supervisor
and worker as part of an otherwise empty package; standard library only.
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
_MOUNT_SETATTR = 442  # system call number, the same on every architecture; glibc has a wrapper only since 2.36
_READ_ONLY, _RECURSIVE, _HERE, _DETACH = 1, 0x8000, -100, 2
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Make this process adopt orphans among its descendants."""
    if sys.platform == "linux":
        _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def new_pid_namespace() -> bool:
    """Make the next child process 1 of a new PID namespace, whose end kills all in it; false if that is not allowed.

    Users other than root also get a user namespace, which the other namespaces need.
    """
    if sys.platform != "linux":
        return False
    probe = os.fork()
    if probe == 0:  # tried in a child first: a failure half way would leave this process as user "nobody"
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
    check_call(_libc.unshare, _NEWPID if user == 0 else _NEWUSER | _NEWPID)
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def isolate_network() -> None:
    """Move this process into a network namespace without interfaces; raises ``OSError`` if that is not allowed."""
    check_call(_libc.unshare, _NEWNET)


def isolate_filesystem(folder: str, size: int, user: int, readable_paths: Sequence[str] | None) -> list[str]:
    """Give process 1 of a PID namespace its own view of the file system, and return the active layers.

    These are ``"processes"``, and where mounts are allowed ``"writes"`` and, with ``readable_paths`` (``None``: all,
    read-only), ``"reads"``. Only ``folder`` and shared memory are writable: tmpfs of ``size`` bytes each, owned by
    ``user``.
    """
    layers = []
    try:
        check_call(_libc.unshare, _NEWNS | _NEWIPC)
        _mount("none", "/", None, _REC | _PRIVATE)
        if readable_paths is None:
            _make_root_read_only(folder, size, user)
        else:
            _pivot_root(readable_paths, folder, size, user)
            layers = ["reads"]
        layers.append("writes")
    except (OSError, AttributeError):
        layers = []
    # The machine's own /proc would show the memory of processes outside.
    hidden = os.path.realpath("/proc/self") == f"/proc/{os.getpid()}" or not os.listdir("/proc")
    return [*layers, "processes"] if hidden else layers


def _make_root_read_only(folder: str, size: int, user: int) -> None:
    _set_read_only("/", _RECURSIVE)
    for target in (folder, "/dev/shm"):
        if os.path.isdir(target):
            _mount("tmpfs", target, "tmpfs", _NOSUID_NODEV, f"size={size},mode=0700,uid={user}")
    _mount_proc("/proc")


def _pivot_root(readable_paths: Sequence[str], folder: str, size: int, user: int) -> None:
    """Switch to a new root directory with only these paths, and unmount the old one."""
    root = folder  # the new root is built at the folder's path, and contains a folder of that path
    _mount("tmpfs", root, "tmpfs", _NOSUID_NODEV, "mode=0755,size=1048576")
    for path in readable_paths:
        _bind(path, root + path)
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}")
    for target in (folder, "/dev/shm"):
        os.makedirs(root + target, exist_ok=True)
        _mount("tmpfs", root + target, "tmpfs", _NOSUID_NODEV, f"size={size},mode=0700,uid={user}")
    os.makedirs(root + "/proc", exist_ok=True)
    _mount_proc(root + "/proc")
    os.makedirs(root + "/tmp", exist_ok=True)
    _set_read_only(root, 0)
    os.chdir(root)
    check_call(_libc.pivot_root, b".", b".")
    check_call(_libc.umount2, b".", _DETACH)
    os.chdir("/")


def _bind(path: str, target: str) -> None:
    """Bind-mount a file or folder of the old root read-only in the new one, or copy a symbolic link."""
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
    if not path.startswith("/dev/"):  # devices stay writable
        _set_read_only(target, _RECURSIVE)


def _mount_proc(target: str) -> None:
    try:
        _mount("proc", target, "proc", _NOSUID_NODEV)
    except OSError:  # refused in containers that mask parts of /proc
        return


def _set_read_only(path: str, flags: int) -> None:
    attributes = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    check_call(_libc.syscall, ctypes.c_long(_MOUNT_SETATTR), _HERE, path.encode(), flags, attributes, len(attributes))


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = None if kind is None else kind.encode()
    check_call(_libc.mount, source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode())


def check_call(function: Callable[..., int], *arguments: Any) -> None:
    """Call a C function that returns 0 on success; raises ``OSError`` if it fails."""
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
