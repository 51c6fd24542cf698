"""Errors of checkpoints, and what they say about the place where one was looked for."""

from pathlib import Path

MANIFEST = "manifest.json"
_LISTED = 12


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint of ours is incomplete or has changed; an older one can be loaded in its place."""


def missing(path: Path) -> CheckpointError:
    """The error for a checkpoint that is not there; it lists the checkpoints beside it.

    Args:
        path: The checkpoint that was asked for.
    """
    folder = path.parent
    if not folder.is_dir():
        return CheckpointError(f"The checkpoint {path} does not exist, and neither does its folder {folder}.")
    names = sorted(one.name for one in folder.iterdir() if looks_like_checkpoint(one))
    if not names:
        return CheckpointError(f"The checkpoint {path} does not exist; there is no checkpoint in {folder}.")
    shown = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
    return CheckpointError(f"The checkpoint {path} does not exist. In {folder} there are: {shown}. Name one of them.")


def looks_like_checkpoint(path: Path) -> bool:
    """Whether something is a checkpoint by its name or its manifest; what kills have left behind is not."""
    if path.name.endswith((".tmp", ".deleted", ".old")):
        return False
    return (path / MANIFEST).is_file() if path.is_dir() else path.suffix in (".ckpt", ".pt", ".pth")
