"""Checkpoints that are single files, as plain strategies write them: whole or not there, and checked before use."""

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

from rlhfkit.checkpoints.cleanup import partial_file
from rlhfkit.checkpoints.errors import MANIFEST, CheckpointError, missing

_BLOCK = 16 * 2**20


class VerifiedCheckpointIO(TorchCheckpointIO):
    """Lightning's single-file checkpoints, written beside their name and renamed, with checksums that are looked at.

    ``torch.save`` stores a CRC-32 of each tensor, which ``torch.load`` does not check (torch 2.13). Here all are
    checked before anything is loaded, also in checkpoints that other programs have saved. Remote paths (``s3://...``)
    go to Lightning's own functions.

    :class:`~rlhfkit.checkpoints.ExactResume` puts it into strategies that have no ``CheckpointIO`` of the user's. By
    hand: ``Trainer(plugins=[VerifiedCheckpointIO()])``.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write a file; killed at any moment, there is the whole file or the one before it.

        Args:
            checkpoint: Lightning's dictionary.
            path: Its folder is made when missing.
            storage_options: Not supported.

        Raises:
            CheckpointError: If the disk is full or cannot be written to; nothing is left behind.
        """
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        partial = partial_file(target)
        with writing(target):
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
        """Check a file and load it.

        Args:
            path: The file.
            map_location: See :func:`torch.load`.
            weights_only: See :func:`torch.load`.

        Raises:
            CheckpointError: If it is missing, empty, damaged, or no checkpoint of a Trainer.
        """
        if not _is_remote(path):
            verify_file(Path(path))
        try:
            checkpoint = super().load_checkpoint(path, map_location, weights_only)
        except Exception as error:
            if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
                raise
            raise CheckpointError(
                f"{path} holds objects of a callback, data module or hyperparameter that are not plain data. Store"
                " plain numbers, strings, lists, dictionaries and tensors instead, or pass weights_only=False for a"
                f" file that you trust: loading it can run code. ({error})"
            ) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            held = sorted(map(str, checkpoint))[:6] if isinstance(checkpoint, dict) else type(checkpoint).__name__
            raise CheckpointError(
                f"{path} is no checkpoint of a Trainer: it has no 'state_dict', it holds {held}. Weights alone"
                " are given to the module as its model, and not as ckpt_path."
            )
        return checkpoint


def verify_file(path: Path) -> None:
    """Check a single-file checkpoint against the checksums in it.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it is missing, a folder, empty, truncated, changed, or no file of ``torch.save``.
    """
    if path.is_dir():
        kind = "a checkpoint of RLHFDeepSpeedStrategy" if (path / MANIFEST).is_file() else "no checkpoint"
        raise CheckpointError(f"{path} is a folder and {kind}; this strategy reads single files. {_advice(path)}")
    if not path.exists():
        raise missing(path)
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty: whatever wrote it was interrupted. {_advice(path)}")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is no file of torch.save, or its end is missing. {_advice(path)}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as stream:
                    while stream.read(_BLOCK):
                        pass
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}). {_advice(path)}") from error


def _advice(path: Path) -> str:
    others = [
        one for one in path.parent.glob("*.ckpt") if one != path and one.is_file() and one.stat().st_size
    ]  # not verified: that takes long
    if not others:
        return "There is no other checkpoint in its folder."
    newest = max(others, key=lambda one: one.stat().st_mtime)
    return f"The newest other checkpoint in its folder is {newest.name}."


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in plain words why a checkpoint cannot be written.

    Args:
        path: The checkpoint.

    Raises:
        CheckpointError: For errors of the file system, which torch reports as ones of its ``inline_container.cc``.
    """
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
    """What the file system said, however torch has wrapped it."""
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error)
        error = error.__cause__ or error.__context__
    return ""


def _existing(folder: Path) -> Path:
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


def sync_directory(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def install(strategy: Strategy) -> None:
    """Use :class:`VerifiedCheckpointIO` in a strategy that has Lightning's own.

    Args:
        strategy: Of a Trainer; those of DeepSpeed write folders and are left alone, as are plugins of the user.
    """
    if not isinstance(strategy, DeepSpeedStrategy) and type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = VerifiedCheckpointIO()


def _is_remote(path: _PATH) -> bool:
    return "://" in str(path)
