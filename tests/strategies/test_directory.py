"""A checkpoint directory is complete or not there, whatever happens while it is written.

Covers strategies/checkpoint/directory.py and strategies/checkpoint/verification.py.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.cleanup import remove_abandoned
from rlhfkit.strategies.checkpoint import directory, hashing, verification


def about(saved_at: float) -> dict[str, Any]:
    """What a manifest says besides its files; the step of a checkpoint is the time it was saved at."""
    return {"saved_at": saved_at, "world_size": 1, "global_step": int(saved_at), "engines": {"policy": 2}}


def write(path: Path, content: str, saved_at: float) -> None:
    """A small checkpoint of two files, one in a folder."""
    folder = directory.create_temporary(path)
    (folder / "policy" / "checkpoint").mkdir(parents=True)
    (folder / "policy" / "checkpoint" / "weights.bin").write_bytes(content.encode() * 200_000)
    (folder / "rank_00000.pt").write_text(content)
    directory.commit(path, hashing.sync_and_hash(folder, directory.list_files(folder)), about(saved_at))


def test_what_was_written_verifies_and_the_temporary_folder_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", "a", 1.0)
    manifest = verification.verify(tmp_path / "a.ckpt")
    assert set(manifest["files"]) == {"policy/checkpoint/weights.bin", "rank_00000.pt"}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_is_used(tmp_path: Path) -> None:
    for number, name in enumerate(["a", "b", "c"]):
        write(tmp_path / f"{name}.ckpt", name, float(number))
    file = tmp_path / "b.ckpt" / "policy" / "checkpoint" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[1234] ^= 1
    file.write_bytes(content)
    chosen, complaints = verification.find_intact(tmp_path / "b.ckpt")
    assert chosen == tmp_path / "a.ckpt", "the one before it, not the one after it"
    assert "weights.bin have changed" in complaints[0]
    assert verification.find_intact(tmp_path / "c.ckpt") == (tmp_path / "c.ckpt", [])


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
        verification.find_intact(tmp_path / "a.ckpt")


def test_paths_that_are_no_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file.ckpt").write_text("weights")
    with pytest.raises(CheckpointError, match="is a file, not a checkpoint directory"):
        verification.find_intact(tmp_path / "file.ckpt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="has no manifest"):
        verification.find_intact(tmp_path / "folder")


def test_a_path_that_does_not_exist_is_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    for number in range(1, 4):
        write(tmp_path / f"step={number}.ckpt", "x", float(number))
    (tmp_path / "step=9.ckpt.tmp").mkdir()
    with pytest.raises(
        CheckpointError, match=r"step=33.ckpt does not exist. .*: step=1.ckpt, step=2.ckpt, step=3.ckpt."
    ):
        verification.find_intact(tmp_path / "step=33.ckpt")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        verification.find_intact(tmp_path / "step=9.ckpt.tmp" / "a.ckpt")


def test_only_damage_is_a_reason_to_take_an_older_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "good.ckpt", "x", 1.0)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "model.safetensors").write_text("weights")
    with pytest.raises(CheckpointError, match="was not written by RLHFDeepSpeedStrategy"):
        verification.find_intact(tmp_path / "foreign")
    write(tmp_path / "newer.ckpt", "x", 2.0)
    manifest = tmp_path / "newer.ckpt" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    with pytest.raises(CheckpointError, match="has format 3; this version reads 1 and 2"):
        verification.find_intact(tmp_path / "newer.ckpt")
    write(tmp_path / "lost.ckpt", "x", 30.0)
    (tmp_path / "lost.ckpt" / "policy" / "checkpoint" / "weights.bin").unlink()
    assert verification.find_intact(tmp_path / "lost.ckpt")[0] == tmp_path / "good.ckpt"
    words = verification.lost_steps(tmp_path / "lost.ckpt", tmp_path / "good.ckpt")
    assert words == "29 optimizer steps are lost: it is of step 1, not of step 30."


def test_a_link_to_a_checkpoint_that_was_never_completed_leads_to_the_newest_one(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"step={number}.ckpt", "x", float(number))
    (tmp_path / "step=3.ckpt.tmp").mkdir()
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")  # ModelCheckpoint(save_last="link") does not wait for the writer
    found, (reason,) = verification.find_intact(tmp_path / "last.ckpt")
    assert found == tmp_path / "step=2.ckpt"
    assert reason.endswith("last.ckpt links to step=3.ckpt, which was not complete when its run ended.")


MANIFESTS = {
    "a list": [],
    "null": None,
    "a number": 3,
    "text": "manifest",
    "empty": {},
    "no files": {"format": 1, "saved_at": 2.0, "world_size": 1, "engines": {}},
    "files as a list": {"format": 1, "saved_at": 2.0, "world_size": 1, "engines": {}, "files": ["rank_00000.pt"]},
    "records as numbers": {"format": 1, "saved_at": 2.0, "world_size": 1, "engines": {}, "files": {"a": 3}},
    "a size as text": {
        "format": 1,
        "saved_at": 2.0,
        "world_size": 1,
        "engines": {},
        "files": {"a": {"size": "3", "sha256": ""}},
    },
    "no ranks": {"format": 1, "saved_at": 2.0, "world_size": 0, "engines": {}, "files": {}},
    "engines as a list": {"format": 1, "saved_at": 2.0, "world_size": 1, "engines": ["policy"], "files": {}},
    "a time as text": {"format": 1, "saved_at": "now", "world_size": 1, "engines": {}, "files": {}},
    "a step as text": {"format": 1, "saved_at": 2.0, "world_size": 1, "global_step": "5", "engines": {}, "files": {}},
}


@pytest.mark.parametrize("content", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_of_any_content_is_damage(tmp_path: Path, content: Any) -> None:
    write(tmp_path / "a.ckpt", "a", 1.0)
    write(tmp_path / "b.ckpt", "b", 2.0)
    (tmp_path / "b.ckpt" / "manifest.json").write_text(json.dumps(content))
    chosen, complaints = verification.find_intact(tmp_path / "b.ckpt")
    assert chosen == tmp_path / "a.ckpt"
    assert "manifest.json cannot be read" in complaints[0]
    assert "how many steps are lost is not known" in verification.lost_steps(tmp_path / "b.ckpt", chosen)


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
    chosen, _ = verification.find_intact(path)
    manifest = json.loads((chosen / "manifest.json").read_text())
    assert (chosen / "rank_00000.pt").read_text() == str(int(manifest["saved_at"]) % 10)
    remove_abandoned(tmp_path)
    unfinished_replacement = {"last.ckpt.old"} if not path.exists() else set()
    assert set(os.listdir(tmp_path)) <= {"last.ckpt"} | unfinished_replacement
    write(path, "next", 1e9)  # and the next save works
    assert (verification.find_intact(path)[0] / "rank_00000.pt").read_text() == "next"
    assert os.listdir(tmp_path) == ["last.ckpt"]
