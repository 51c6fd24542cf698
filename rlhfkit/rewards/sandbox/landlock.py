"""Landlock: rules for files, signals and tracing that a process sets for itself without privileges (Linux 5.13, 6.12).

The fallback without namespaces. Loaded in the worker as part of an otherwise empty package; standard library only.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system call numbers, the same on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_KNOWN = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file access rights in each ABI version; 16 in later ones
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_SCOPED = 3  # abstract sockets and signals reach only processes with the same rules

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's ABI version in this kernel; 0 if it has none."""
    version: int = _libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION))
    return max(version, 0)


class Rules:
    """Rules for readable (and executable) and writable paths, created while files can be opened, and enforced later.

    Raises ``OSError`` if the kernel has no Landlock.
    """

    def __init__(self, readable: Iterable[str], writable: Iterable[str]) -> None:
        abi = version()
        if abi == 0:
            raise OSError("this kernel has no Landlock")
        self.signals = abi >= 6
        """Whether processes outside can be neither signalled nor traced (ABI 6); older kernels prevent tracing only."""
        every = (1 << _KNOWN.get(abi, 16)) - 1
        attributes = struct.pack("QQQ", every, 0, _SCOPED if self.signals else 0)[: 24 if self.signals else 8]
        self._landlock_rules = _libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
        if self._landlock_rules < 0:
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
            _libc.syscall(_ADD, ctypes.c_int(self._landlock_rules), _PATH_BENEATH, rule, ctypes.c_uint(0))
        finally:
            os.close(descriptor)

    def enforce(self) -> None:
        """Enforce the rules for this process and all it will start; raises ``OSError`` if the kernel refuses."""
        refused = _libc.syscall(_RESTRICT, ctypes.c_int(self._landlock_rules), ctypes.c_uint(0))
        os.close(self._landlock_rules)
        if refused:
            raise OSError(ctypes.get_errno(), "Landlock refused")
