"""A checkpoint directory is complete or not there, whatever happens while it is written.

Covers strategies/checkpoint/directory.py, strategies/checkpoint/verification.py and, with several ranks,
strategies/checkpoint/slow_steps.py.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.toy_runs import survives

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import DamagedCheckpointError, remove_abandoned
from rlhfkit.strategies.checkpoint import directory, verification

WEIGHTS = "mp_rank_00_model_states.pt"


def about(saved_at: float) -> dict[str, Any]:
    """What a manifest says besides its files; the step of a checkpoint is the time it was saved at."""
    return {"saved_at": saved_at, "world_size": 1, "global_step": int(saved_at), "engines": {"policy": 2}}


def write(path: Path, content: str, saved_at: float) -> None:
    """A small checkpoint of two files, one in a folder."""
    folder = directory.create_temporary(path)
    (folder / "policy" / "checkpoint").mkdir(parents=True)
    torch.save(torch.full((200_000,), ord(content[0]), dtype=torch.uint8), folder / "policy" / "checkpoint" / WEIGHTS)
    torch.save(content, folder / "rank_00000.pt")
    directory.commit(path, directory.sync_files(folder, directory.list_files(folder)), about(saved_at))


def test_what_was_written_verifies_and_the_temporary_folder_is_gone(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", "a", 1.0)
    manifest = verification.verify(tmp_path / "a.ckpt")
    assert set(manifest["files"]) == {f"policy/checkpoint/{WEIGHTS}", "rank_00000.pt"}
    assert os.listdir(tmp_path) == ["a.ckpt"]


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_is_used(tmp_path: Path) -> None:
    for number, name in enumerate(["a", "b", "c"]):
        write(tmp_path / f"{name}.ckpt", name, float(number))
    file = tmp_path / "b.ckpt" / "policy" / "checkpoint" / WEIGHTS
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1
    file.write_bytes(content)
    chosen, complaints = verification.find_intact(tmp_path / "b.ckpt")
    assert chosen == tmp_path / "a.ckpt", "the one before it, not the one after it"
    assert f"{WEIGHTS} is damaged (Bad CRC-32" in complaints[0]
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
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this version reads 3"):
        verification.find_intact(tmp_path / "newer.ckpt")
    write(tmp_path / "lost.ckpt", "x", 30.0)
    (tmp_path / "lost.ckpt" / "policy" / "checkpoint" / WEIGHTS).unlink()
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


READABLE: dict[str, Any] = {"format": 3, "saved_at": 2.0, "world_size": 1, "engines": {}, "files": {}}
MANIFESTS = {
    "a list": [],
    "null": None,
    "a number": 3,
    "text": "manifest",
    "empty": {},
    "no files": {name: value for name, value in READABLE.items() if name != "files"},
    "files as a list": READABLE | {"files": ["rank_00000.pt"]},
    "records as objects": READABLE | {"files": {"a": {"size": 3}}},
    "a size as text": READABLE | {"files": {"a": "3"}},
    "no ranks": READABLE | {"world_size": 0},
    "engines as a list": READABLE | {"engines": ["policy"]},
    "a time as text": READABLE | {"saved_at": "now"},
    "a step as text": READABLE | {"global_step": "5"},
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


def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    path, found = tmp_path / "last.ckpt", set()
    moments: list[dict[str, Any]] = [{"file_bytes": size} for size in (0, 1, 500, 100_000)]
    for moment in itertools.chain(moments, ({"operations": number} for number in itertools.count())):
        write(path, "before", 1.0)  # also beside what the last kill has left
        assert torch.load(verification.find_intact(path)[0] / "rank_00000.pt") == "before"
        assert os.listdir(tmp_path) == ["last.ckpt"]
        ended = survives(lambda: write(path, "after", 2.0), **moment)
        chosen, _ = verification.find_intact(path)
        content, saved_at = torch.load(chosen / "rank_00000.pt"), directory.read_manifest(chosen)["saved_at"]
        assert content == {1.0: "before", 2.0: "after"}[saved_at]
        assert content == "after" or not ended
        remove_abandoned(tmp_path)
        unfinished_replacement = {"last.ckpt.old"} if not path.exists() else set()
        assert set(os.listdir(tmp_path)) <= {"last.ckpt"} | unfinished_replacement
        found.add((chosen.name, content))
        if ended:
            break
    assert found == {("last.ckpt", "before"), ("last.ckpt.old", "before"), ("last.ckpt", "after")}


# ---------------------------------------------------------------- several ranks

FILES = {
    "policy/checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt": 4321,
    "policy/checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": 2000,
    "policy/checkpoint/mp_rank_00_model_states.pt": 7777,
    "policy/zero_to_fp32.py": 0,
    "rank_00000.pt": 300,
    "rank_00001.pt": 301,
    "module/critic/rank_00007.pt": 2500,  # of a rank that is none of this run
}


def write_of_two_ranks(path: Path, saved_at: float = 1.0) -> None:
    """A checkpoint of two ranks."""
    folder = directory.create_temporary(path)
    for name, size in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".pt"):
            torch.save(torch.arange(size), folder / name)
        else:
            (folder / name).write_text("")
    sizes = directory.sync_files(folder, directory.list_files(folder))
    directory.commit(path, sizes, about(saved_at) | {"world_size": 2})


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_file_is_verified_by_exactly_one_rank_and_by_the_one_that_wrote_it(tmp_path: Path, count: int) -> None:
    write_of_two_ranks(tmp_path / "a.ckpt")
    manifest = directory.read_manifest(tmp_path / "a.ckpt")
    assert manifest["files"] == {name: (tmp_path / "a.ckpt" / name).stat().st_size for name in FILES}
    shares = [directory.share_of_rank(manifest, rank, count) for rank in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(FILES)
    if count == 2:
        for rank, share in enumerate(shares):
            assert {directory.rank_of_file(name) for name in share} <= {None, rank}
            assert f"rank_0000{rank}.pt" in share
    else:
        numbers = [len(share) for share in shares]
        assert max(numbers) - min(numbers) <= 1


def test_a_change_is_found_by_the_rank_whose_share_it_is_in(tmp_path: Path) -> None:
    write_of_two_ranks(tmp_path / "a.ckpt")
    file = tmp_path / "a.ckpt" / "policy/checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    verification.verify(tmp_path / "a.ckpt", rank=0, world_size=2)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} is damaged"):
        verification.verify(tmp_path / "a.ckpt", rank=1, world_size=2)


def test_files_that_deepspeed_pickled_without_checksums_are_compared_by_size(tmp_path: Path) -> None:
    folder = directory.create_temporary(tmp_path / "a.ckpt")
    torch.save({"weight": torch.ones(3)}, folder / "rank_00000.pt", _use_new_zipfile_serialization=False)
    directory.commit(tmp_path / "a.ckpt", directory.sync_files(folder, ["rank_00000.pt"]), about(1.0))
    verification.verify(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt" / "rank_00000.pt").write_bytes(b"\x80")
    with pytest.raises(DamagedCheckpointError, match="has 1 bytes"):
        verification.verify(tmp_path / "a.ckpt")
