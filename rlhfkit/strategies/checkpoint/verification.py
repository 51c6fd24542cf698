"""Verify checkpoint directories before they are loaded: every rank its own files, with one result for all ranks."""

import contextlib
import pickle
from pathlib import Path
from typing import Any

from rlhfkit.checkpoints.files import MANIFEST, CheckpointError, DamagedCheckpointError, damage_of_zip
from rlhfkit.distributed import get_rank, get_world_size
from rlhfkit.strategies.checkpoint.directory import backup_path, read_manifest, share_of_rank
from rlhfkit.strategies.checkpoint.slow_steps import on_all_ranks, on_rank_zero


def verify(path: Path, *, checksums: bool = True, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Check a rank's share of a checkpoint against the manifest, which is returned.

    Args:
        path: The directory.
        checksums: Whether to read the files of ``torch.save``, which have a CRC-32 of each tensor; otherwise sizes are
            compared.
        rank: Whose share; with the default ``world_size`` of 1, everything.
        world_size: Ranks that verify the checkpoint together.

    Raises:
        DamagedCheckpointError: Naming the first file that is missing, of the wrong size, or changed.
        CheckpointError: If it is no checkpoint of this strategy.
    """
    manifest = read_manifest(path)
    share = share_of_rank(manifest, rank, world_size)
    for name in share:
        file, size = path / name, manifest["files"][name]
        if not file.is_file():
            raise DamagedCheckpointError(f"{path}: the file {name} is missing.")
        if file.stat().st_size != size:
            raise DamagedCheckpointError(f"{path}: {name} has {file.stat().st_size} bytes, not {size}.")
    for name in share if checksums else ():
        if name.endswith(".pt") and not _has_no_checksums(path / name) and (damage := damage_of_zip(path / name)):
            raise DamagedCheckpointError(f"{path}: the file {name} {damage}.")
    return manifest


def _has_no_checksums(file: Path) -> bool:
    """Whether DeepSpeed has written a plain pickle, as its option ``checkpoint_serialization: false`` asks for."""
    with open(file, "rb") as stream:
        return stream.read(1) == pickle.PROTO


def verify_on_all_ranks(path: Path, *, timeout: float = 7200.0) -> None:
    """Verify a checkpoint, every rank its share; errors as of :func:`verify`, the same on all ranks. A collective.

    Raises CheckpointError too if a rank dies or takes longer than ``timeout`` seconds.
    """

    def verify_share() -> CheckpointError | None:
        try:
            verify(path, rank=get_rank(), world_size=get_world_size())
        except CheckpointError as error:
            return error
        except OSError as error:
            return DamagedCheckpointError(str(error))
        return None

    found = on_all_ranks(verify_share, timeout=timeout, doing=f"verifying {path}")
    failed = [(rank, error) for rank, error in enumerate(found) if error is not None]
    if failed:
        rank, error = failed[0]
        raise type(error)(f"{error}" + ("" if len(failed) == len(found) else f" (Found by rank {rank}.)"))


def find_intact(path: Path, *, timeout: float = 7200.0) -> tuple[Path, list[str]]:
    """Return the checkpoint, or if it is damaged the newest intact older one, and why others were not used.

    If only a backup of the path exists, a run was killed between the two renames of
    :func:`~rlhfkit.strategies.checkpoint.directory.commit`; the backup is used. A link to a checkpoint that a killed
    run was writing in the background counts as damaged. The result or the error is the same on all ranks. Raises
    CheckpointError if the path is missing or no checkpoint, or no intact one is found. A collective.
    """
    reasons: list[str] = []
    doing = f"looking for {path}"
    unfinished = on_rank_zero(lambda: _unfinished(path), timeout=timeout, doing=doing)
    if unfinished:
        reasons.append(unfinished)
    else:
        try:
            verify_on_all_ranks(path, timeout=timeout)
            return path, reasons
        except DamagedCheckpointError as error:
            reasons.append(str(error))
    for candidate in on_rank_zero(lambda: older_checkpoints(path), timeout=timeout, doing=doing):
        try:
            verify_on_all_ranks(candidate, timeout=timeout)
            return candidate, reasons
        except CheckpointError as error:
            reasons.append(str(error))
    raise CheckpointError("There is no intact checkpoint to load. " + " ".join(reasons))


def _unfinished(path: Path) -> str:
    """Why a run was killed before it completed a checkpoint that does not exist; empty if nothing shows that."""
    if not path.exists() and backup_path(path).is_dir():
        return f"{path} was being replaced when its run was killed."
    if not path.exists() and path.is_symlink():
        return f"{path} links to {path.readlink()}, which was not complete when its run ended."
    return ""


def older_checkpoints(path: Path) -> list[Path]:
    """Return checkpoints to load instead of ``path``: its backup, then others in its folder, newest first.

    If the manifest of ``path`` can be read, checkpoints saved after it are left out.
    """
    limit = float("inf")
    with contextlib.suppress(CheckpointError):
        limit = read_manifest(path)["saved_at"]
    siblings = []
    for folder in path.parent.iterdir() if path.parent.is_dir() else ():
        if folder.resolve() in (path.resolve(), backup_path(path).resolve()) or not (folder / MANIFEST).is_file():
            continue
        if folder.name.endswith(".tmp"):
            continue
        try:
            saved_at = read_manifest(folder)["saved_at"]
        except CheckpointError:
            continue
        if saved_at < limit:
            siblings.append((saved_at, folder))
    backup = [backup_path(path)] if backup_path(path).is_dir() else []
    return backup + [folder for _, folder in sorted(siblings, reverse=True)]


def lost_steps(wanted: Path, found: Path) -> str:
    """Return a sentence about the optimizer steps lost by loading ``found`` instead of the damaged ``wanted``."""
    here = read_manifest(found)["global_step"]
    there = None
    with contextlib.suppress(CheckpointError):
        there = read_manifest(wanted)["global_step"]
    if here is None or there is None:
        return f"It is of optimizer step {here}; how many steps are lost is not known."
    return f"{there - here} optimizer steps are lost: it is of step {here}, not of step {there}."
