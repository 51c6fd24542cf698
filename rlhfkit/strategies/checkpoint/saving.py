"""Every rank writes its files of a checkpoint, and rank 0 commits it: at once, or in threads beside training."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import explain_write_errors
from rlhfkit.distributed import get_rank
from rlhfkit.rank_store import rank_store
from rlhfkit.strategies.checkpoint import directory
from rlhfkit.strategies.checkpoint.engine_files import Write
from rlhfkit.strategies.checkpoint.slow_steps import on_all_ranks, on_rank_zero

T = TypeVar("T")

_LOG = "saves in the background"


def save_directory(
    path: Path,
    steps: Iterable[Callable[[], None]],
    about: Mapping[str, Any],
    *,
    timeout: float,
    folders: Iterable[str] = (),
    log: str = "saves",
) -> None:
    """Write a checkpoint on every rank; when all have written their files, rank 0 commits it. On all ranks.

    Until the commit the checkpoint has its temporary name: a kill at any moment leaves the one before it.

    Args:
        path: Final path of the checkpoint.
        steps: Write this rank's files into ``temporary_path(path)``. No rank begins one before all have ended the last.
        about: What the manifest says besides its files.
        timeout: Seconds that ranks wait for one another.
        folders: In the checkpoint, created before any rank writes.
        log: See :func:`~rlhfkit.strategies.checkpoint.slow_steps.on_all_ranks`.

    Raises:
        CheckpointError: On all ranks, if one could not write. Nothing incomplete is left then.
    """
    temporary = directory.temporary_path(path)
    options: dict[str, Any] = {"timeout": timeout, "doing": f"saving {path}", "log": log}

    def explained(step: Callable[[], T]) -> Callable[[], T]:
        def explained_step() -> T:
            with explain_write_errors(path):
                return step()

        return explained_step

    def create_folders() -> None:
        directory.create_temporary(path)
        for folder in folders:
            (temporary / folder).mkdir(parents=True)

    def sync_files() -> dict[str, int]:
        # A rank may sync what another has written: names of files tell the rank only without tensor parallelism.
        return directory.sync_files(temporary, directory.files_of_rank(temporary, get_rank()))

    try:
        on_rank_zero(explained(create_folders), **options)
        # Not ended early by the error of another rank: rank 0 deletes the folder, in which nobody may write then.
        for step in steps:
            on_all_ranks(explained(step), in_thread=False, **options)
        parts = on_all_ranks(explained(sync_files), in_thread=False, **options)
        sizes = {name: size for part in parts for name, size in part.items()}
        on_rank_zero(explained(lambda: directory.commit(path, sizes, about)), **options)
    except Exception:
        if get_rank() == 0:
            with contextlib.suppress(OSError):
                directory.remove(temporary)
        raise


class BackgroundSave:
    """:func:`save_directory` in a thread, which writes the snapshots of this rank.

    The threads agree through the rank store and call no collective.

    Args:
        path: Final path of the checkpoint.
        writes: Snapshots of this rank's files, which are dropped one by one when they are on disk.
        about: What the manifest says besides its files.
        timeout: Seconds that ranks wait for one another.
    """

    def __init__(self, path: Path, writes: list[Write], about: Mapping[str, Any], *, timeout: float) -> None:
        self.path = path
        self._writes = writes
        self._about = about
        self._timeout = timeout
        self._error: Exception | None = None
        self._ended = False
        self._afterwards: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        rank_store()  # the first call is a collective
        self._thread = threading.Thread(target=self._run, name=f"save {path.name}", daemon=True)
        self._thread.start()

    def run_afterwards(self, task: Callable[[], None]) -> bool:
        """Have a task run when the checkpoint is complete, and never if it fails; False if it is complete already."""
        with self._lock:
            if not self._ended:
                self._afterwards.append(task)
            return not self._ended or self._error is not None

    def wait(self, timeout: float) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: If it could not be written, on all ranks; or if that takes longer than ``timeout`` seconds.
        """
        started = time.monotonic()
        if self._thread.is_alive():
            rank_zero_info(f"Waiting for {self.path}, which is still being written in the background.")
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise CheckpointError(
                f"{self.path} is still being written after another {time.monotonic() - started:.0f} s. If the disk is"
                " only slow, raise the strategy's checkpoint_timeout."
            )
        if self._error is not None:
            reason = str(self._error) if isinstance(self._error, CheckpointError) else repr(self._error)
            raise CheckpointError(f"A checkpoint was not saved in the background: {reason}") from self._error

    def _run(self) -> None:
        try:
            save_directory(self.path, [self._write_files], self._about, timeout=self._timeout, log=_LOG)
        except Exception as error:  # raised in the training thread by wait
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            self._error, self._ended = error, True
            if error is None:
                for task in self._afterwards:
                    task()

    def _write_files(self) -> None:
        while self._writes:
            write = self._writes.pop(0)
            write.folder.mkdir(parents=True, exist_ok=True)
            write.write()
