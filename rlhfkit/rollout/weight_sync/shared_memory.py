"""``SharedBlocks``: memory that the trainer and the engines of one machine share, so that weights need no socket."""

import mmap
import os
import secrets
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

_FOLDER = Path("/dev/shm")  # files in memory, on Linux
INVISIBLE = "cannot open the trainer's shared memory"
"""What :meth:`SharedBlocks.open` says where it is another container's or user's."""


class SharedBlocks:
    """Two blocks of memory behind one file that only this user can open.

    Args:
        descriptor: An open file of twice ``num_bytes``; closed here, the memory lives as long as this object.
        num_bytes: Size of a block.
    """

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        try:
            memory = torch.frombuffer(mmap.mmap(descriptor, 2 * num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        self.num_bytes = num_bytes
        self._blocks = memory.split(num_bytes)
        self.path: Path | None = None
        """Where others find it, until :meth:`hide`."""

    @classmethod
    def create(cls, num_bytes: int) -> Self | None:
        """Reserve the memory; ``None`` where this machine has no such memory, or not enough of it.

        Args:
            num_bytes: Size of a block.
        """
        path = _FOLDER / f"rlhfkit-{secrets.token_hex(16)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        try:
            os.posix_fallocate(descriptor, 0, 2 * num_bytes)  # a container often has 64 MiB: else writing would kill us
            blocks = cls(descriptor, num_bytes)
        except OSError:
            path.unlink()
            return None
        blocks.path = path
        return blocks

    @classmethod
    def open(cls, path: str, num_bytes: int) -> Self:
        """What another process has created.

        Args:
            path: Where.
            num_bytes: Size of a block.

        Raises:
            RuntimeError: If this process does not see it.
        """
        try:
            return cls(os.open(path, os.O_RDWR), num_bytes)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"{INVISIBLE}: {error}") from error

    def hide(self) -> None:
        """Remove the name: nobody else can open the memory, and it is freed with the last process that has."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None

    def block(self, turn: int) -> Tensor:
        """(num_bytes,) uint8.

        Args:
            turn: Even: the first, odd: the second.
        """
        return self._blocks[turn % 2]
