"""The protocol between trainer and worker: framed messages over a socket pair, each response tied to its request.

A request starts with 128 random bits, which its response repeats: one that was written in advance, twice, or by a
process that has not read the request is detected. On Linux the kernel also reports which process wrote each chunk, and
the trainer accepts only the worker's. Loaded by path in the worker; standard library only.
"""

import contextlib
import fcntl
import os
import resource
import socket
import struct
from typing import Any

HEADER = struct.Struct(">16sQ")
"""Identifier of the request; number of bytes that follow."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PIECE = 1 << 16
_HIGH = 128  # lowest descriptor number for the worker: user code closes and scans low ones


class ProtocolError(Exception):
    """The bytes received are not the response to the request."""


class Response:
    """Assembles one response with the identifier ``number``, of at most ``largest`` bytes."""

    def __init__(self, number: bytes, largest: int) -> None:
        self.number = number
        self.largest = largest
        self.received = bytearray()

    def add(self, piece: bytes) -> bytes | None:
        """Add the next bytes, and return the message once it is complete.

        Raises :class:`ProtocolError` for a wrong identifier or extra bytes, ``OverflowError`` if more is announced than
        allowed.
        """
        self.received += piece
        if not self.number.startswith(bytes(self.received[:16])):
            raise ProtocolError("answered a request that was not made, and was killed")
        if len(self.received) < HEADER.size:
            return None
        size = HEADER.unpack_from(self.received)[1]
        if size > self.largest:
            raise OverflowError(f"answered with more than {self.largest / 2**20:g} MiB and was killed")
        if len(self.received) > HEADER.size + size:
            raise ProtocolError("wrote more than its answer, and was killed")
        return bytes(self.received[HEADER.size :]) if len(self.received) == HEADER.size + size else None


def configure_trainer_socket(end: socket.socket) -> None:
    """Make the trainer's end non-blocking, and have the kernel report who writes to it."""
    end.setblocking(False)
    if hasattr(socket, "SO_PASSCRED"):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def receive(end: socket.socket) -> tuple[bytes, int | None]:
    """Return the next bytes and the id of the process that wrote them; ``None`` where the kernel does not report it."""
    if not hasattr(socket, "SO_PASSCRED"):
        return end.recv(_PIECE), None
    # Room for credentials only: the kernel drops file descriptors that are sent along.
    data, extra, _, _ = end.recvmsg(_PIECE, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return data, _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
    return data, None


class WorkerChannel:
    """The worker's end, hidden from the code it runs: a high file descriptor that child processes do not inherit."""

    def __init__(self, descriptor: int, largest: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = _HIGH if most == resource.RLIM_INFINITY else min(_HIGH, most // 2)
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(descriptor)
        self._socket = socket.socket(fileno=high)
        self.largest = largest
        self._owner = os.getpid()
        self._number = b""
        os.register_at_fork(after_in_child=self._close_in_child)

    def read(self) -> bytes | None:
        """Return the next request; ``None`` when the trainer has closed the connection."""
        head = self._read_exactly(HEADER.size)
        if head is None:
            return None
        self._number, size = HEADER.unpack(head)
        return self._read_exactly(size)

    def write(self, message: bytes) -> None:
        """Send the only response to the last request, of at most ``largest`` bytes."""
        if os.getpid() != self._owner:  # a fork of the worker that has returned from the user's code
            os._exit(1)
        number, self._number = self._number, b""
        self._socket.sendall(HEADER.pack(number, len(message)) + message)

    def _read_exactly(self, size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            piece = self._socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                return None
            received += piece
        return bytes(received)

    def _close_in_child(self, *_: Any) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
