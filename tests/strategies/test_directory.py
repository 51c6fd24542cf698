"""A checkpoint directory is whole or not there, whatever happens while it is written."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from rlhfkit.strategies import directory
from rlhfkit.strategies.directory import CheckpointError


def write(path: Path, content: str, saved_at: float) -> None:
    """A small checkpoint of two files, one in a folder."""
    folder = directory.start(path)
    (folder / "policy").mkdir()
    (folder / "policy" / "weights.bin").write_bytes(content.encode() * 200_000)
    (folder / "rank_00000.pt").write_text(content)
    directory.publish(path, directory.seal(folder, directory.files_in(folder)), {"saved_at": saved_at, "world_size": 1})


def test_what_was_written_verifies_and_the_temporary_folder_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", "a", 1.0)
    manifest = directory.verify(tmp_path / "a.ckpt")
    assert set(manifest["files"]) == {"policy/weights.bin", "rank_00000.pt"}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_is_used(tmp_path: Path) -> None:
    for number, name in enumerate(["a", "b", "c"]):
        write(tmp_path / f"{name}.ckpt", name, float(number))
    file = tmp_path / "b.ckpt" / "policy" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[1234] ^= 1
    file.write_bytes(content)
    chosen, complaints = directory.usable(tmp_path / "b.ckpt")
    assert chosen == tmp_path / "a.ckpt", "the one before it, not the one after it"
    assert "weights.bin have changed" in complaints[0]
    assert directory.usable(tmp_path / "c.ckpt") == (tmp_path / "c.ckpt", [])


@pytest.mark.parametrize("damage", ["missing", "short", "manifest"])
def test_other_damage_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path / "a.ckpt", "a", 1.0)
    file = tmp_path / "a.ckpt" / ("manifest.json" if damage == "manifest" else "rank_00000.pt")
    match damage:
        case "missing":
            file.unlink()
        case "short":
            file.write_text("")
        case "manifest":
            file.write_text(file.read_text()[:-20])
    expected = {"missing": "is missing", "short": "has 0 bytes", "manifest": "cannot be read"}[damage]
    with pytest.raises(CheckpointError, match=expected):
        directory.usable(tmp_path / "a.ckpt")


def test_paths_that_are_no_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("weights")
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint directory"):
        directory.usable(tmp_path / "file.ckpt")
    with pytest.raises(CheckpointError, match="does not exist"):
        directory.usable(tmp_path / "nothing.ckpt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="has no manifest"):
        directory.usable(tmp_path / "folder")


def _save_for_ever(path: Path) -> None:
    for number in range(1, 10_000):
        write(path, str(number % 10), float(number))


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "last.ckpt"
    write(path, "0", 0.0)
    process = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(path,))
    process.start()
    time.sleep(random.Random(seed).uniform(0.01, 0.15))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    chosen, _ = directory.usable(path)
    manifest = json.loads((chosen / "manifest.json").read_text())
    assert (chosen / "rank_00000.pt").read_text() == str(int(manifest["saved_at"]) % 10)
    write(path, "next", 1e9)  # and the next save works
    assert (directory.usable(path)[0] / "rank_00000.pt").read_text() == "next"
    assert os.listdir(tmp_path) == ["last.ckpt"]
