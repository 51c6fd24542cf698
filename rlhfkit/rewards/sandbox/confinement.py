"""Confine a process: resource limits everywhere, and on Linux another user for root, Landlock and seccomp.

Landlock (Linux 5.13; signals 6.12) is a set of rules for files, signals and tracing, and seccomp a filter of system
calls (x86-64 and ARM64); a process sets both for itself, without privileges. Each layer is tried, and those that are
active are reported; ``docs/security.md`` lists them by machine, and a test checks that table by attacks. Loaded by path
in the worker; standard library only.
"""

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_SET_DUMPABLE, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _SET_PDEATHSIG = 4, 8, 38, 47, 1
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def confine(
    limits: dict[str, Any],
    folder: str,
    *,
    user: int,
    existing: Sequence[str] = (),
    readable: Iterable[str] = (),
    readable_paths: Sequence[str] | None = None,
) -> list[str]:
    """Confine this process and all it will start, irrevocably, and return the active layers besides resource limits.

    ``folder`` is the writable one and becomes the working directory. Root becomes the user with the id ``user``, who
    can still read the folders ``readable``, such as those of modules. ``existing`` layers are those of bubblewrap,
    which runs this process. Untrusted code may read ``readable_paths`` only (``None``: what the trainer can).
    """
    linux, root = sys.platform == "linux", os.geteuid() == 0
    layers = [*existing]
    if linux:
        succeeds(Path("/proc/self/oom_score_adj").write_text, "1000")
    _set_limit(resource.RLIMIT_AS, int(limits["memory_gib"] * 2**30))
    _set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _set_limit(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
    _set_limit(resource.RLIMIT_CORE, 0)
    rules = _landlock_rules(readable_paths, folder) if linux and "writes" not in layers else None
    if root and linux and succeeds(_drop_root, user, folder, readable if readable_paths is None else readable_paths):
        layers.append("user")
    elif linux:
        succeeds(_set_capabilities, 0)
    os.chdir(folder)
    os.umask(0o077)
    alone = "user" in layers or ("processes" in layers and _counted_per_namespace())
    _set_limit(resource.RLIMIT_NPROC, limits["processes"] + (0 if alone else _running_tasks()))
    if linux:
        _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # switched off, with /proc/self, by the change of user
        _libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0)
        if rules is not None and succeeds(rules.enforce):
            layers += [
                "writes",
                *([] if readable_paths is None else ["reads"]),
                *(["trainer"] if rules.signals else []),
            ]
        layers += _filter_system_calls(layers, network=limits["network"], trusted=readable_paths is None)
    if {"user", "processes"} & set(layers) and "trainer" not in layers:
        layers.append("trainer")
    return list(dict.fromkeys(layers))


def _landlock_rules(readable_paths: Sequence[str] | None, folder: str) -> "LandlockRules | None":
    """Create the Landlock rules while all paths can still be opened; ``None`` without Landlock.

    What is trusted reads everything, and writes to devices (a GPU) and shared memory (locks of ``multiprocessing``).
    """
    try:
        if readable_paths is None:
            return LandlockRules(["/"], [folder, "/dev"])
        return LandlockRules(readable_paths, [folder, *_DEVICES])
    except OSError:
        return None


def _filter_system_calls(layers: Sequence[str], *, network: bool, trusted: bool) -> list[str]:
    """Install a filter of system calls, and return the layers it provides."""
    groups = [MEMORY_CALLS]
    groups += [] if trusted else [CROSS_PROCESS_CALLS]
    groups += [] if network or "network" in layers else [NETWORK_CALLS]
    if not install_filter(*groups, few_families=not network and "network" in layers):
        return []
    return ["memory", *(["network"] if NETWORK_CALLS in groups else [])]


def _set_limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    succeeds(resource.setrlimit, kind, (value, value))  # some limits of macOS cannot be set


def _drop_root(user: int, folder: str, readable: Iterable[str]) -> None:
    """Switch from root, to which the limit on processes does not apply, to a user without privileges.

    The user keeps the capability to read all files where the interpreter or a folder is not readable for everybody.
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
    if _libc.capset(header, struct.pack("IIIIII", kept, kept, kept, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
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


# ------------------------------------------------------------------------------------------------ Landlock

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system call numbers, the same on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_KNOWN = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file access rights in each ABI version; 16 in later ones
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_SCOPED = 3  # abstract sockets and signals reach only processes with the same rules


def landlock_version() -> int:
    """Landlock's ABI version in this kernel; 0 if it has none."""
    version: int = _libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    return max(version, 0)


class LandlockRules:
    """Rules for readable (and executable) and writable paths, created while files can be opened, and enforced later.

    Raises ``OSError`` if the kernel has no Landlock.
    """

    def __init__(self, readable: Iterable[str], writable: Iterable[str]) -> None:
        abi = landlock_version()
        if abi == 0:
            raise OSError("this kernel has no Landlock")
        self.signals = abi >= 6
        """Whether processes outside can be neither signalled nor traced (ABI 6); older kernels prevent tracing only."""
        every = (1 << _KNOWN.get(abi, 16)) - 1
        attributes = struct.pack("QQQ", every, 0, _SCOPED if self.signals else 0)[: 24 if self.signals else 8]
        self._rules = _libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
        if self._rules < 0:
            raise OSError(ctypes.get_errno(), "Landlock took no rules")
        for path in readable:
            self._allow(path, _EXECUTE | _READ_FILE | _READ_FOLDER)
        for path in writable:
            self._allow(path, every)

    def _allow(self, path: str, rights: int) -> None:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # it does not exist, or may not be opened
            return
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("=Qi", rights, descriptor)
            _libc.syscall(_ADD, ctypes.c_int(self._rules), _PATH_BENEATH, rule, ctypes.c_uint(0))
        finally:
            os.close(descriptor)

    def enforce(self) -> None:
        """Enforce the rules for this process and all it will start; raises ``OSError`` if the kernel refuses."""
        refused = _libc.syscall(_RESTRICT, ctypes.c_int(self._rules), ctypes.c_uint(0))
        os.close(self._rules)
        if refused:
            raise OSError(ctypes.get_errno(), "Landlock refused")


# ------------------------------------------------------------------------------------------------ seccomp

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in the filter's input, struct seccomp_data
_X32 = 0x40000000  # calls of x86-64's x32 ABI
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_NEW_NAMESPACES = 0x7E020000  # any CLONE_NEW...

MEMORY_CALLS = {"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194)}
"""Calls that allocate memory outside of any process, which no limit counts. They fail as in a kernel without them."""

NETWORK_CALLS = {"socket": (41, 198)}
"""Sockets of any kind; pairs within a program still work."""

_NETWORKED_FAMILIES = (1, 2, 10)  # Unix, IPv4 and IPv6: what the network namespace of bubblewrap holds

CROSS_PROCESS_CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "msgget": (68, 186), "semget": (64, 190),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "clone3": (435, 435),
}  # fmt: skip
"""Calls that reach other processes, namespaces and file systems, or that filters cannot inspect (io_uring, clone3)."""


def install_filter(*groups: dict[str, tuple[int, int]], few_families: bool = False) -> bool:
    """Make system calls fail, as if missing, in this process and all it will start; false if the kernel refuses.

    Needs ``PR_SET_NO_NEW_PRIVS``. The groups hold names with their numbers on x86-64 and ARM64. With ``few_families``
    there are sockets of Unix and the internet only: a network namespace isolates others (vsock, netlink) in part or
    not at all.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return False
    number, column = architecture
    refused = sorted({numbers[column] for group in groups for numbers in group.values()})
    socket = NETWORK_CALLS["socket"][column] if few_families else None
    namespaces = CROSS_PROCESS_CALLS not in groups
    program = b"".join(_filter(number, refused, clone=(56, 220)[column], namespaces=namespaces, socket=socket))
    code = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    whole = Program(len(program) // 8, ctypes.addressof(code))
    result: int = ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(whole), 0, 0)
    return result == 0


def _filter(architecture: int, refused: list[int], *, clone: int, namespaces: bool, socket: int | None) -> list[bytes]:
    """Return the instructions of a classic BPF program; ``socket`` is the call of which some families are refused."""

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    missing = step(_RETURN, _ERROR | errno.ENOSYS)
    steps = [step(_LOAD, _ARCHITECTURE), step(_EQUAL, architecture, 1, 0), missing, step(_LOAD, _NUMBER)]
    steps += [step(_GREATER_EQUAL, _X32, 0, 1), missing]
    for number in refused:
        steps += [step(_EQUAL, number, 0, 1), missing]
    if socket is not None:
        allowed = [step(_EQUAL, family, after, 0) for family, after in zip(_NETWORKED_FAMILIES, (3, 2, 1), strict=True)]
        steps += [step(_EQUAL, socket, 0, 6), step(_LOAD, _FIRST_ARGUMENT), *allowed]
        steps += [step(_RETURN, _ERROR | errno.EAFNOSUPPORT), step(_RETURN, _ALLOW)]
    if not namespaces:  # clone must not create any
        steps += [step(_EQUAL, clone, 0, 3), step(_LOAD, _FIRST_ARGUMENT), step(_ANY_BIT, _NEW_NAMESPACES, 0, 1)]
        steps += [step(_RETURN, _ERROR | errno.EPERM)]
    return [*steps, step(_RETURN, _ALLOW)]
