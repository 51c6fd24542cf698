"""Filters of system calls (seccomp), which need no privilege (Linux on x86-64 and ARM64).

Loaded in the worker as part of an otherwise empty package; standard library only.
"""

import ctypes
import errno
import platform
import struct

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

_NETWORKED_FAMILIES = (1, 2, 10)  # Unix, IPv4 and IPv6: what a network namespace holds

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
