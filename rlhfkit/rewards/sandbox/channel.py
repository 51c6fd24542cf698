"""How trainer and worker talk: framed messages over a pair of sockets, each answer tied to its request.

A request starts with a number of 128 random bits and its size, and the answer starts with the same number. Whoever does
not hold the request cannot know the number, so an answer that was written ahead, written twice or written by somebody
else is noticed, and never taken for the answer to another request. On Linux the kernel also says which process wrote
each piece, and the trainer takes pieces from the worker only.

Loaded by path in the worker, so it imports the standard library only.
"""

import contextlib
import fcntl
import os
import resource
import socket
import struct
from typing import Any

HEAD = struct.Struct(">16sQ")
"""Number of the request; bytes that follow."""
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PIECE = 1 << 16
_HIGH = 128  # the worker's descriptor is at least this: user code closes and scans low ones


class WrongAnswer(Exception):
    """What arrived is not the answer to what was asked."""


class Answer:
    """The bytes of one answer, as they arrive.

    Args:
        number: Of the request.
        largest: Bytes that it may have.
    """

    def __init__(self, number: bytes, largest: int) -> None:
        self.number = number
        self.largest = largest
        self.received = bytearray()

    def add(self, piece: bytes) -> bytes | None:
        """Take what has arrived.

        Args:
            piece: The next bytes.

        Returns:
            The message once it is complete.

        Raises:
            WrongAnswer: If it has another number, or bytes follow it.
            OverflowError: If it says that it is larger than an answer may be.
        """
        self.received += piece
        if not self.number.startswith(bytes(self.received[:16])):
            raise WrongAnswer("answered a request that was not made, and was killed")
        if len(self.received) < HEAD.size:
            return None
        size = HEAD.unpack_from(self.received)[1]
        if size > self.largest:
            raise OverflowError(f"answered with more than {self.largest / 2**20:g} MiB and was killed")
        if len(self.received) > HEAD.size + size:
            raise WrongAnswer("wrote more than its answer, and was killed")
        return bytes(self.received[HEAD.size :]) if len(self.received) == HEAD.size + size else None


def trainer_end(end: socket.socket) -> None:
    """Prepare the trainer's end of the pair.

    Args:
        end: Of a stream socket pair.
    """
    end.setblocking(False)
    if hasattr(socket, "SO_PASSCRED"):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def receive(end: socket.socket) -> tuple[bytes, int | None]:
    """The next bytes and the process that wrote them; ``None`` where the kernel does not tell.

    Args:
        end: The trainer's.
    """
    if not hasattr(socket, "SO_PASSCRED"):
        return end.recv(_PIECE), None
    # Room for credentials only: descriptors that somebody sends along are dropped by the kernel.
    data, extra, _, _ = end.recvmsg(_PIECE, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return data, _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0]
    return data, None


class WorkerEnd:
    """The worker's end, out of the way of the code that it runs: a high descriptor that no other process inherits.

    Args:
        descriptor: That it was started with.
        largest: Bytes that an answer may have.
    """

    def __init__(self, descriptor: int, largest: int) -> None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = _HIGH if most == resource.RLIM_INFINITY else min(_HIGH, most // 2)
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest)
        os.close(descriptor)
        self._socket = socket.socket(fileno=high)
        self.largest = largest
        self._owner = os.getpid()
        self._number = b""
        os.register_at_fork(after_in_child=self._drop)

    def read(self) -> bytes | None:
        """The next request; ``None`` when there will be none."""
        head = self._exactly(HEAD.size)
        if head is None:
            return None
        self._number, size = HEAD.unpack(head)
        return self._exactly(size)

    def write(self, message: bytes) -> None:
        """Answer the request that was read last, once.

        Args:
            message: At most ``largest`` bytes.
        """
        if os.getpid() != self._owner:  # a fork of the worker that has come back from the code it was to run
            os._exit(1)
        number, self._number = self._number, b""
        self._socket.sendall(HEAD.pack(number, len(message)) + message)

    def _exactly(self, size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            piece = self._socket.recv(min(size - len(received), 1 << 20))
            if not piece:
                return None
            received += piece
        return bytes(received)

    def _drop(self, *_: Any) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
