"""Checkpoints on disk: files, written atomically and verified when loaded; errors; what killed runs have left."""

import contextlib
import json
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy

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


# ---------------------------------------------------------------- errors

MANIFEST = "manifest.json"
_LISTED = 12


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint directory is incomplete or has changed; an older one may be intact."""


def missing_checkpoint(path: Path) -> CheckpointError:
    """Return the error for a checkpoint that does not exist, listing those in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return CheckpointError(f"The checkpoint {path} does not exist, and neither does its folder {folder}.")
    names = sorted(one.name for one in folder.iterdir() if looks_like_checkpoint(one))
    if not names:
        return CheckpointError(f"The checkpoint {path} does not exist; there is no checkpoint in {folder}.")
    shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return CheckpointError(f"The checkpoint {path} does not exist. In {folder} there are: {shown}. Name one of them.")


def looks_like_checkpoint(path: Path) -> bool:
    """Whether a path is a complete checkpoint, by its name and its manifest."""
    if path.name.endswith((".tmp", ".old")):
        return False
    return (path / MANIFEST).is_file() if path.is_dir() else path.suffix in (".ckpt", ".pt", ".pth")


@contextmanager
def explain_unpickling_errors(path: Path | str, advice: str = "") -> Iterator[None]:
    """Raise CheckpointError, ending with ``advice``, if ``torch.load`` refuses objects (``weights_only``)."""
    try:
        yield
    except Exception as error:
        if "weights_only" not in str(error).lower() and "weights only" not in str(error).lower():
            raise
        raise CheckpointError(
            f"{path} holds objects of a callback, data module or hyperparameter that are not plain data. Store plain"
            f" numbers, strings, lists, dictionaries and tensors instead{advice}. ({error})"
        ) from error


# ---------------------------------------------------------------- unfinished checkpoints of killed processes

OWNER = "owner.json"
"""File in a checkpoint that is being written, with the machine and process that write it."""

MODULE_FOLDER = "module"
"""Folder in a checkpoint with what the module saves by itself, such as the checkpoint of a critic elsewhere."""

_ABANDONED = 86400.0
"""Seconds without a change after which unfinished work of another machine counts as abandoned."""

_PARTIAL_FILE = re.compile(r"\.(?P<host>[^.]+)-(?P<pid>\d+)\.tmp$")


def partial_path(path: Path) -> Path:
    """Return a temporary path for a file or folder, whose name contains this machine and process."""
    return path.with_name(f"{path.name}.{_host()}-{os.getpid()}.tmp")


def write_owner(folder: Path) -> None:
    """Write :data:`OWNER` with this machine and process into a folder."""
    (folder / OWNER).write_text(json.dumps({"host": _host(), "pid": os.getpid()}))


def remove_abandoned(folder: Path) -> list[Path]:
    """Remove and return unfinished checkpoints of ended processes, and checkpoints whose deletion was interrupted.

    Whether a process of another machine still runs is unknown; its unfinished work is removed when it is a day old.
    """
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # another process removes it too
            if _is_removable(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                removed.append(path)
    return removed


def _is_removable(path: Path) -> bool:
    if path.is_symlink():
        return False
    if path.name.endswith(".old"):  # its replacement is complete, but its process was killed before deleting it
        return (path / MANIFEST).is_file() and (path.with_name(path.name.removesuffix(".old")) / MANIFEST).is_file()
    by_name = _owner_by_name(path)
    ours = by_name is not None or (path.name.endswith(".tmp") and (path / OWNER).is_file())
    return ours and _is_abandoned(path, by_name or _owner(path))


def _owner_by_name(path: Path) -> tuple[str, int] | None:
    found = _PARTIAL_FILE.search(path.name)
    return None if found is None else (found["host"], int(found["pid"]))


def _owner(folder: Path) -> tuple[str, int] | None:
    try:
        owner = json.loads((folder / OWNER).read_text())
        return str(owner["host"]), int(owner["pid"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _is_abandoned(path: Path, owner: tuple[str, int] | None) -> bool:
    if owner is not None and owner[0] == _host():
        return owner[1] == os.getpid() or not _is_alive(owner[1])
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return time.time() - max(file.stat().st_mtime for file in files) > _ABANDONED


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _host() -> str:
    """Name of this machine and, on Linux, its process namespace: containers number their processes independently."""
    name = socket.gethostname().replace(".", "_").replace("-", "_")
    with contextlib.suppress(OSError):
        name += f"_{os.stat('/proc/self/ns/pid').st_ino}"
    return name
