"""Landlock: files, signals and tracing by rules that a process gives itself, without any privilege (Linux 5.13, 6.12).

It is what is left where namespaces are not allowed. Imported in the worker as part of a package that brings nothing
else; standard library only.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_KNOWN = {1: 13, 2: 14, 3: 15, 4: 15}  # rights to files of each version; 16 later on
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_SCOPED = 3  # abstract sockets, and signals, stay among those with the same rules

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Landlock's version in this kernel; 0 without."""
    return max(_libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION)), 0)


class Rules:
    """Rules that are made while files can be reached, and put into force later.

    Args:
        readable: Files and folders that may be read and run.
        writable: Folders, and devices, that may be written, too.

    Raises:
        OSError: If the kernel has no Landlock.
    """

    def __init__(self, readable: Iterable[str], writable: Iterable[str]) -> None:
        abi = version()
        if abi == 0:
            raise OSError("this kernel has no Landlock")
        self.signals = abi >= 6
        """Whether processes outside can neither be signalled nor traced; before, tracing only."""
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
        except OSError:  # it does not exist, or is not for us
            return
        try:
            if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
                rights &= _OF_FILES
            rule = struct.pack("=Qi", rights, descriptor)
            _libc.syscall(_ADD, ctypes.c_int(self._rules), _PATH_BENEATH, rule, ctypes.c_uint(0))
        finally:
            os.close(descriptor)

    def enforce(self) -> None:
        """Put them into force, for this process and all it will start.

        Raises:
            OSError: If the kernel refuses.
        """
        refused = _libc.syscall(_RESTRICT, ctypes.c_int(self._rules), ctypes.c_uint(0))
        os.close(self._rules)
        if refused:
            raise OSError(ctypes.get_errno(), "Landlock refused")
