"""Chunks, threads and ranks share the checksums of a checkpoint: each byte is read once, and every change is found.

Covers strategies/checkpoint/hashing.py, strategies/checkpoint/verification.py and strategies/checkpoint/slow_steps.py.
"""

import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhfkit.checkpoints.errors import DamagedCheckpointError
from rlhfkit.strategies.checkpoint import directory, hashing, verification
from strategies import ranks

CHUNK = 1000
FILES = {
    "policy/checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt": 4321,
    "policy/checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": 2000,
    "policy/checkpoint/mp_rank_00_model_states.pt": 7777,
    "policy/zero_to_fp32.py": 0,
    "rank_00000.pt": 300,
    "rank_00001.pt": 301,
    "module/critic/rank_00007.pt": 2500,  # of a rank that is none of this run
}


def write(path: Path) -> None:
    """A checkpoint of two ranks with small chunks."""
    folder = directory.create_temporary(path)
    for number, (name, size) in enumerate(FILES.items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes((number + position) % 251 for position in range(size)))
    records = hashing.sync_and_hash(folder, directory.list_files(folder), chunk_bytes=CHUNK)
    about = {"saved_at": 1.0, "world_size": 2, "global_step": 1, "engines": {"policy": 2}}
    directory.commit(path, records, about | {"chunk_bytes": CHUNK})


def test_checksums_are_those_of_hashlib_by_chunk(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    for name, record in directory.read_manifest(tmp_path / "a.ckpt")["files"].items():
        content = (tmp_path / "a.ckpt" / name).read_bytes()
        parts = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)] or [b""]
        assert record == {"size": FILES[name], "sha256": [hashlib.sha256(part).hexdigest() for part in parts]}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_byte_is_read_by_exactly_one_rank_in_fair_shares(tmp_path: Path, count: int) -> None:
    write(tmp_path / "a.ckpt")
    manifest = directory.read_manifest(tmp_path / "a.ckpt")
    shares = [hashing.share_of_rank(manifest, rank, count) for rank in range(count)]
    covered = Counter((chunk.name, chunk.start) for share in shares for chunk in share)
    assert set(covered.values()) == {1}
    assert sum(chunk.length for share in shares for chunk in share) == sum(FILES.values())
    if count == 2:
        for rank, share in enumerate(shares):
            assert {hashing.rank_of_file(chunk.name) for chunk in share if "rank_00" not in chunk.name} <= {0, rank}
            assert f"rank_0000{rank}.pt" in {chunk.name for chunk in share}
            assert f"rank_0000{1 - rank}.pt" not in {chunk.name for chunk in share}
    else:
        numbers = [len(share) for share in shares]
        assert max(numbers) - min(numbers) <= 1


def test_a_change_of_any_byte_is_found_by_the_rank_whose_share_it_is_in(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    file = tmp_path / "a.ckpt" / "policy/checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    for position in (0, 999, 1000, 1999):
        file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        verification.verify(tmp_path / "a.ckpt", rank=0, world_size=2)
        with pytest.raises(
            DamagedCheckpointError, match=rf"{file.name} have changed .*bytes {position // CHUNK * CHUNK:,} to"
        ):
            verification.verify(tmp_path / "a.ckpt", rank=1, world_size=2, threads=2)


def test_checkpoints_with_one_checksum_per_file_are_still_verified(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt")
    manifest = json.loads((tmp_path / "a.ckpt" / "manifest.json").read_text())
    del manifest["chunk_bytes"]
    manifest["format"] = 1
    for name, record in manifest["files"].items():
        record["sha256"] = hashlib.sha256((tmp_path / "a.ckpt" / name).read_bytes()).hexdigest()
    (tmp_path / "a.ckpt" / "manifest.json").write_text(json.dumps(manifest))
    for count in (1, 2, 3):
        for rank in range(count):
            verification.verify(tmp_path / "a.ckpt", rank=rank, world_size=count)
    (tmp_path / "a.ckpt" / "rank_00001.pt").write_bytes(bytes(301))
    with pytest.raises(DamagedCheckpointError, match=r"rank_00001\.pt have changed"):
        verification.verify(tmp_path / "a.ckpt")


@pytest.mark.parametrize(
    "change", [{"chunk_bytes": None}, {"chunk_bytes": 0}, {"chunk_bytes": "1000"}, {"chunk_bytes": 999}, {"format": 1}]
)
def test_checksums_that_do_not_fit_the_sizes_are_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "a.ckpt")
    manifest = tmp_path / "a.ckpt" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json cannot be read"):
        verification.verify(tmp_path / "a.ckpt")


@pytest.mark.distributed
def test_all_ranks_learn_what_one_has_found(tmp_path: Path) -> None:
    for name in ("older", "damaged"):
        write(tmp_path / f"{name}.ckpt")
        time.sleep(0.01)
    manifest = tmp_path / "damaged.ckpt" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"saved_at": 2.0}))
    (tmp_path / "damaged.ckpt" / "rank_00001.pt").write_bytes(bytes(301))
    results = ranks.run("strategies.verification_cases:find", 2, tmp_path / "logs", place=str(tmp_path))
    assert results[0] == results[1]
    assert results[0]["found"] == "older.ckpt"
    assert "rank_00001.pt have changed" in results[0]["reason"]
    assert results[0]["reason"].endswith("(Found by rank 1.)")
    assert "missing.ckpt does not exist" in results[0]["missing"]
    assert "No space left" in results[0]["failed"]
