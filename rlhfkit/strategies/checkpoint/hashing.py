"""Checksums of checkpoint files, chunk by chunk: threads share a file, and ranks the files of a checkpoint."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rlhfkit.checkpoints.cleanup import MODULE_FOLDER

CHUNK_BYTES = 64 * 2**20
"""Bytes of a file per checksum."""

_BLOCK = 4 * 2**20
_MOST_THREADS = 8  # at 1 to 2 GB/s each with the SHA instructions of processors, as fast as disks are
_FILE_OF_RANK = re.compile(r"(?:^|/)(?:rank_|(?:[a-z0-9]+_)?zero_pp_rank_)(\d+)[._]")
"""``rank_00003.pt``, and DeepSpeed 0.19.8's ``zero_pp_rank_3_mp_rank_00_model_states.pt`` with or without a prefix."""


class Chunk(NamedTuple):
    """A part of a file and its checksum."""

    name: str
    start: int
    length: int
    sha256: str = ""


def threads_per_rank(ranks_on_machine: int = 1) -> int:
    """Return how many threads a rank hashes with: its share of the machine's processors, 8 at most."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, processors // ranks_on_machine))


def rank_of_file(name: str) -> int:
    """Return the rank that wrote a file, by its name; 0 for files that all ranks have in common."""
    found = _own_file(name)
    return int(found[1]) if found else 0


def _own_file(name: str) -> re.Match[str] | None:
    """The match of the name of a file that one rank has written, ``None`` for common files."""
    return None if name.startswith(f"{MODULE_FOLDER}/") else _FILE_OF_RANK.search(name)


def sync_and_hash(
    folder: Path, names: Iterable[str], *, threads: int | None = None, chunk_bytes: int = CHUNK_BYTES
) -> dict[str, dict[str, Any]]:
    """Force files to disk; return their records for the manifest: size, and the SHA-256 of each chunk, by name."""
    sizes = {}
    for name in names:
        with open(folder / name, "rb") as stream:
            os.fsync(stream.fileno())
            sizes[name] = os.fstat(stream.fileno()).st_size
    chunks = [chunk for name, size in sizes.items() for chunk in _divide(name, size, chunk_bytes)]
    records: dict[str, dict[str, Any]] = {name: {"size": size, "sha256": []} for name, size in sizes.items()}
    for chunk, digest in zip(chunks, _digests(folder, chunks, threads), strict=True):
        records[chunk.name]["sha256"].append(digest)
    return records


def _divide(name: str, size: int, chunk_bytes: int) -> list[Chunk]:
    starts = range(0, max(size, 1), chunk_bytes)  # an empty file has one chunk
    return [Chunk(name, start, min(chunk_bytes, size - start)) for start in starts]


def number_of_chunks(size: int, chunk_bytes: int) -> int:
    """Return the number of checksums of a file."""
    return max(1, -(-size // chunk_bytes))


def share_of_rank(manifest: Mapping[str, Any], rank: int, world_size: int) -> list[Chunk]:
    """Return the chunks of a checkpoint that a rank verifies; each belongs to exactly one of the ranks.

    If the checkpoint was saved by the same number of ranks, those of files that the rank itself wrote, which it loads
    next, and an equal share of the common files. Otherwise an equal share of everything.
    """
    same_ranks, dealt, share = manifest["world_size"] == world_size, 0, []
    for name, record in manifest["files"].items():
        owned = same_ranks and _own_file(name) is not None
        for chunk in _recorded_chunks(name, record, manifest):
            if (rank_of_file(name) if owned else dealt % world_size) == rank:
                share.append(chunk)
            dealt += not owned
    return share


def _recorded_chunks(name: str, record: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[Chunk]:
    if isinstance(record["sha256"], str):  # format 1 has one checksum of the whole file
        return [Chunk(name, 0, record["size"], record["sha256"])]
    chunks = _divide(name, record["size"], manifest["chunk_bytes"])
    return [chunk._replace(sha256=digest) for chunk, digest in zip(chunks, record["sha256"], strict=True)]


def changed_chunks(folder: Path, chunks: list[Chunk], *, threads: int | None = None) -> list[Chunk]:
    """Read chunks and return those whose checksums differ."""
    digests = _digests(folder, chunks, threads)
    return [chunk for chunk, digest in zip(chunks, digests, strict=True) if digest != chunk.sha256]


def _digests(folder: Path, chunks: list[Chunk], threads: int | None) -> list[str]:
    with ThreadPoolExecutor(threads or threads_per_rank()) as pool:  # hashlib and reading release the GIL
        return list(pool.map(lambda chunk: _digest(folder, chunk), chunks))


def _digest(folder: Path, chunk: Chunk) -> str:
    digest, left = hashlib.sha256(), chunk.length
    with open(folder / chunk.name, "rb", buffering=0) as stream:
        stream.seek(chunk.start)
        while left and (block := stream.read(min(_BLOCK, left))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()
