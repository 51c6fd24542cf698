"""Single-file checkpoints, as most strategies of Lightning write them: written atomically, verified when loaded."""

import contextlib
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy

from rlhfkit.checkpoints.cleanup import partial_path
from rlhfkit.checkpoints.errors import MANIFEST, CheckpointError, explain_unpickling_errors, missing_checkpoint

_BLOCK = 16 * 2**20


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Saves single-file checkpoints atomically and verifies their checksums before loading.

    ``torch.save`` stores a CRC-32 of each tensor, which ``torch.load`` does not check (torch 2.13); all are checked
    here, also in files of other programs. Remote paths (``s3://...``) are passed to Lightning's own functions.
    :class:`~rlhfkit.checkpoints.ExactResume` installs it in strategies without a ``CheckpointIO`` of the user; without
    that callback: ``Trainer(plugins=[VerifiedCheckpointIO()])``.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a file atomically: if the process is killed, the previous file of that name is still complete.

        Raises:
            CheckpointError: If the file cannot be written, for example because the disk is full.
        """
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        partial = partial_path(target)
        with explain_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(partial, "wb") as stream:
                    torch.save(checkpoint, stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(partial, target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            sync_directory(target.parent)

    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Verify a file and load it; arguments as for :func:`torch.load`.

        Raises:
            CheckpointError: If it is missing, empty, damaged, or no checkpoint of a Trainer.
        """
        if not _is_remote(path):
            verify_file(Path(path))
        advice = ", or pass weights_only=False for a file that you trust: loading it can run code"
        with explain_unpickling_errors(str(path), advice):
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            held = sorted(map(str, checkpoint))[:6] if isinstance(checkpoint, dict) else type(checkpoint).__name__
            raise CheckpointError(
                f"{path} is no checkpoint of a Trainer: it has no 'state_dict', it holds {held}. Weights alone"
                " are given to the module as its model, and not as ckpt_path."
            )
        return checkpoint


def verify_file(path: Path) -> None:
    """Verify the checksums in a file of ``torch.save``; CheckpointError if it is missing, damaged, or no such file."""
    if path.is_dir():
        kind = "a checkpoint of RLHFDeepSpeedStrategy" if (path / MANIFEST).is_file() else "no checkpoint"
        raise CheckpointError(f"{path} is a folder and {kind}; this strategy reads single files. {_advice(path)}")
    if not path.exists():
        raise missing_checkpoint(path)
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty: whatever wrote it was interrupted. {_advice(path)}")
    if damage := damage_of_zip(path):
        raise CheckpointError(f"{path} ({path.stat().st_size} bytes) {damage}. {_advice(path)}")


def damage_of_zip(path: Path) -> str:
    """Compare the CRC-32 checksums of a file of ``torch.save``; return what is wrong with it, or an empty text."""
    if not zipfile.is_zipfile(path):
        return "is no file of torch.save, or its end is missing"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    while stream.read(_BLOCK):
                        pass
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        return f"is damaged ({error})"
    return ""


def _advice(path: Path) -> str:
    others = [
        one for one in path.parent.glob("*.ckpt") if one != path and one.is_file() and one.stat().st_size
    ]  # not verified: that would take long
    if not others:
        return "There is no other checkpoint in its folder."
    newest = max(others, key=lambda one: one.stat().st_mtime)
    return f"The newest other checkpoint in its folder is {newest.name}."


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Raise CheckpointError for errors of the file system, which torch reports as errors of ``inline_container.cc``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        of_files = isinstance(error, OSError) or "PytorchStreamWriter" in str(error) or "inline_container" in str(error)
        if isinstance(error, CheckpointError) or not of_files:
            raise
        reason = _os_error(error)
        free = shutil.disk_usage(_existing(path.parent)).free
        raise CheckpointError(
            f"The checkpoint {path} could not be written: {reason or 'the write failed'}; {free / 2**20:,.0f} MiB are"
            " free there. Nothing incomplete was left under its name. Free space (ModelCheckpoint(save_top_k=...) keeps"
            " fewer) or save to another disk."
        ) from error


def _os_error(error: BaseException | None) -> str:
    """Return the message of the file system behind an error that torch has raised."""
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return ""


def _existing(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def sync_directory(folder: Path) -> None:
    """Force the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def install_verified_io(strategy: Strategy) -> None:
    """Replace Lightning's default ``CheckpointIO`` by :class:`VerifiedCheckpointIO`.

    The user's plugins stay; DeepSpeed strategies, which write folders, are not changed.
    """
    if not isinstance(strategy, DeepSpeedStrategy) and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = VerifiedCheckpointIO()


def _is_remote(path: _PATH) -> bool:
    return "://" in str(path)
