"""``SharedBlocks``: memory that is shared by the trainer and the engines of one machine, to send weights faster."""

import mmap
import os
import secrets
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

_FOLDER = Path("/dev/shm")  # files in memory, on Linux
INVISIBLE = "cannot open the trainer's shared memory"
"""Error text of :meth:`SharedBlocks.open` for the memory of another container or user."""


class SharedBlocks:
    """Two blocks of ``num_bytes`` behind one file that only this user can open.

    ``descriptor``, an open file of both, is closed; the memory lives as long as this object.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        try:
            memory = torch.frombuffer(mmap.mmap(descriptor, 2 * num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.num_bytes = num_bytes
        self._blocks = (memory[:num_bytes], memory[num_bytes:])
        self.path: Path | None = None
        """Path of the file, until :meth:`hide`."""

    @classmethod
    def create(cls, num_bytes: int) -> Self | None:
        """Reserve the memory; ``None`` if this machine has no shared memory or not enough of it."""
        path = _FOLDER / f"rlhfkit-{secrets.token_hex(16)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, 2 * num_bytes)  # fails if there is less; writing would kill this process
            blocks = cls(descriptor, num_bytes)
        except OSError:
            path.unlink()
            return None
        blocks.path = path
        return blocks

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Self:
        """Open memory created by another process; RuntimeError if this process does not see it."""
        try:
            return cls(os.open(path, os.O_RDWR), num_bytes)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{INVISIBLE}: {error}") from error

    def hide(self) -> None:
        """Delete the file name: nobody else can open the memory, and it is freed with its last process."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def block(self, number: int) -> Tensor:
        """Return a (num_bytes,) uint8 block; the first for even numbers, the second for odd ones."""
        return self._blocks[number % 2]
