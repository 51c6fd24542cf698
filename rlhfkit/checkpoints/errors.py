"""Errors of checkpoints that cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    if path.name.endswith((".tmp", ".deleted", ".old")):
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
