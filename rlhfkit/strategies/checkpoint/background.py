"""``BackgroundSave``: a checkpoint that every rank writes in a thread of its own while training goes on."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import explain_write_errors
from rlhfkit.distributed import get_rank
from rlhfkit.rank_store import rank_store
from rlhfkit.strategies.checkpoint import directory
from rlhfkit.strategies.checkpoint.hashing import sync_and_hash
from rlhfkit.strategies.checkpoint.slow_steps import on_all_ranks, on_rank_zero
from rlhfkit.strategies.checkpoint.snapshot import Write

_LOG = "saves in the background"


class BackgroundSave:
    """Writes the snapshots of this rank; when all ranks have written theirs, rank 0 commits the checkpoint.

    The threads agree through the rank store and call no collective. Until the commit the checkpoint has its temporary
    name, as in a save that blocks: a kill at any moment leaves the one before it.

    Args:
        path: Final path of the checkpoint.
        writes: Snapshots of this rank's files, which are dropped one by one when they are on disk.
        about: What the manifest says besides its files.
        timeout: Seconds that ranks wait for one another.
        threads: That hash at a time.
    """

    def __init__(
        self, path: Path, writes: list[Write], about: Mapping[str, Any], *, timeout: float, threads: int
    ) -> None:
        self.path = path
        self._writes = writes
        self._about = about
        self._timeout = timeout
        self._threads = threads
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
            self._save()
        except Exception as error:  # raised in the training thread by wait
            if get_rank() == 0:
                shutil.rmtree(directory.temporary_path(self.path), ignore_errors=True)
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        with self._lock:
            self._error, self._ended = error, True
            if error is None:
                for task in self._afterwards:
                    task()

    def _save(self) -> None:
        options: dict[str, Any] = {"timeout": self._timeout, "doing": f"saving {self.path}", "log": _LOG}
        on_rank_zero(self._create_folder, **options)
        # Not ended early by the error of another rank: rank 0 deletes the folder, in which nobody may write then.
        on_all_ranks(self._write_files, in_thread=False, **options)
        # A rank may hash what another has written: names of files tell the rank only without tensor parallelism.
        records = on_all_ranks(self._hash_files, in_thread=False, **options)
        merged = {name: record for part in records for name, record in part.items()}
        on_rank_zero(lambda: self._commit(merged), **options)

    def _create_folder(self) -> None:
        with explain_write_errors(self.path):
            directory.create_temporary(self.path)

    def _write_files(self) -> None:
        with explain_write_errors(self.path):
            while self._writes:
                write = self._writes.pop(0)
                write.folder.mkdir(parents=True, exist_ok=True)
                write.write()

    def _hash_files(self) -> dict[str, dict[str, Any]]:
        with explain_write_errors(self.path):
            folder = directory.temporary_path(self.path)
            return sync_and_hash(folder, directory.files_of_rank(folder, get_rank()), threads=self._threads)

    def _commit(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        with explain_write_errors(self.path):
            directory.commit(self.path, records, self._about)
