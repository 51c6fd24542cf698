"""A checkpoint directory is complete or not there, whatever happens while it is written.

Covers strategies/checkpoint/directory.py, strategies/checkpoint/verification.py and, with several ranks,
strategies/checkpoint/slow_steps.py.
"""

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints.toy_runs import survives

from rlhfkit.checkpoints import CheckpointError
from rlhfkit.checkpoints.files import DamagedCheckpointError, remove_abandoned
from rlhfkit.strategies.checkpoint import directory, verification

WEIGHTS = "policy/checkpoint/mp_rank_00_model_states.pt"


def write_files(path: Path, files: Mapping[str, Any], saved_at: float, world_size: int = 1) -> None:
    """A checkpoint, whose step is the time it was saved at."""
    folder = directory.create_temporary(path)
    for name, value in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / name)
    about = {"saved_at": saved_at, "world_size": world_size, "global_step": int(saved_at), "engines": {"policy": 2}}
    directory.commit(path, directory.sync_files(folder, directory.list_files(folder)), about)


def write(path: Path, content: str, saved_at: float) -> None:
    """A small checkpoint of two files, one in a folder."""
    weights = torch.full((200_000,), ord(content[0]), dtype=torch.uint8)
    write_files(path, {WEIGHTS: weights, "rank_00000.pt": content}, saved_at)


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def in_manifest(**entries: Any) -> Callable[[Path], Any]:
    """Other entries of a manifest."""

    def change(manifest: Path) -> None:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | entries))

    return change


LOST = "29 optimizer steps are lost: it is of step 1, not of step 30."
MANIFEST, UNKNOWN = ("manifest.json", "manifest.json cannot be read"), "how many steps are lost is not known"
DAMAGES: dict[str, tuple[tuple[str, str], str, Callable[[Path], Any]]] = {
    "a byte": ((WEIGHTS, f"{WEIGHTS} is damaged (Bad CRC-32"), LOST, flip_a_byte),
    "missing": (("rank_00000.pt", "rank_00000.pt is missing"), LOST, Path.unlink),
    "short": (("rank_00000.pt", "rank_00000.pt has 0 bytes"), LOST, lambda file: file.write_text("")),
    "no manifest": (("manifest.json", "has no manifest.json, though it has files of ranks"), UNKNOWN, Path.unlink),
    "half a manifest": (MANIFEST, UNKNOWN, lambda file: file.write_text(file.read_text()[:-20])),
    "a list": (MANIFEST, UNKNOWN, lambda file: file.write_text("[]")),
    "empty": (MANIFEST, UNKNOWN, lambda file: file.write_text("{}")),
    "files as a list": (MANIFEST, UNKNOWN, in_manifest(files=["rank_00000.pt"])),
    "a size as text": (MANIFEST, UNKNOWN, in_manifest(files={"a": "3"})),
    "no ranks": (MANIFEST, UNKNOWN, in_manifest(world_size=0)),
    "engines as a list": (MANIFEST, UNKNOWN, in_manifest(engines=["policy"])),
    "a time as text": (MANIFEST, UNKNOWN, in_manifest(saved_at="now")),
    "a step as text": (MANIFEST, UNKNOWN, in_manifest(global_step="5")),
}
"""By name: the file with the complaint, what is said of the steps that are lost, and what is done to the file."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_an_older_checkpoint_is_used(tmp_path: Path, damage: str) -> None:
    (name, complaint), lost, do = DAMAGES[damage]
    for checkpoint, saved_at in (("a", 1.0), ("b", 30.0)):
        write(tmp_path / f"{checkpoint}.ckpt", checkpoint, saved_at)
    do(tmp_path / "b.ckpt" / name)
    chosen, complaints = verification.find_intact(tmp_path / "b.ckpt")
    assert chosen == tmp_path / "a.ckpt"
    assert complaint in complaints[0]
    assert lost in verification.lost_steps(tmp_path / "b.ckpt", chosen)


def test_a_newer_checkpoint_does_not_take_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    for checkpoint, saved_at in (("a", 1.0), ("b", 30.0)):
        write(tmp_path / f"{checkpoint}.ckpt", checkpoint, saved_at)
    flip_a_byte(tmp_path / "a.ckpt" / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"no intact checkpoint to load\. .*is damaged"):
        verification.find_intact(tmp_path / "a.ckpt")
    assert verification.find_intact(tmp_path / "b.ckpt") == (tmp_path / "b.ckpt", [])


def test_only_damage_is_a_reason_to_take_an_older_checkpoint(tmp_path: Path) -> None:
    for number in range(1, 5):
        write(tmp_path / f"step={number}.ckpt", "x", float(number))
    in_manifest(format=2)(tmp_path / "step=4.ckpt" / "manifest.json")
    (tmp_path / "file.ckpt").write_text("weights")
    for folder in ("foreign", "step=9.ckpt.tmp"):
        (tmp_path / folder).mkdir()
    for name, message in {
        "file.ckpt": "is a file, not a checkpoint directory",
        "foreign": "has no manifest.json: it was not written by RLHFDeepSpeedStrategy",
        "step=4.ckpt": "has format 2; this version reads 3",
        "step=33.ckpt": r"step=33.ckpt does not exist. .*: file.ckpt, step=1.ckpt, .*step=4.ckpt\.",
        "step=9.ckpt.tmp/a.ckpt": "there is no checkpoint in",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            verification.find_intact(tmp_path / name)


def test_a_link_to_a_checkpoint_that_was_never_completed_leads_to_the_newest_one(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"step={number}.ckpt", "x", float(number))
    (tmp_path / "step=3.ckpt.tmp").mkdir()
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")  # ModelCheckpoint(save_last="link") does not wait for the writer
    found, (reason,) = verification.find_intact(tmp_path / "last.ckpt")
    assert found == tmp_path / "step=2.ckpt"
    assert reason.endswith("last.ckpt links to step=3.ckpt, which was not complete when its run ended.")


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


@pytest.fixture
def of_two_ranks(tmp_path: Path) -> Path:
    """A checkpoint."""
    write_files(tmp_path / "a.ckpt", {name: torch.arange(size) for name, size in FILES.items()}, 1.0, world_size=2)
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_file_is_verified_by_exactly_one_rank_and_by_the_one_that_wrote_it(
    of_two_ranks: Path, count: int
) -> None:
    manifest = directory.read_manifest(of_two_ranks)
    assert manifest["files"] == {name: (of_two_ranks / name).stat().st_size for name in FILES}
    shares = [directory.share_of_rank(manifest, rank, count) for rank in range(count)]
    assert sorted(name for share in shares for name in share) == sorted(FILES)
    if count == 2:
        for rank, share in enumerate(shares):
            assert {directory.rank_of_file(name) for name in share} <= {None, rank}
            assert f"rank_0000{rank}.pt" in share
    else:
        numbers = [len(share) for share in shares]
        assert max(numbers) - min(numbers) <= 1


def test_a_change_is_found_by_the_rank_whose_share_it_is_in(of_two_ranks: Path) -> None:
    file = of_two_ranks / "policy/checkpoint/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flip_a_byte(file)
    verification.verify(of_two_ranks, rank=0, world_size=2)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name} is damaged"):
        verification.verify(of_two_ranks, rank=1, world_size=2)


def test_files_that_deepspeed_pickled_without_checksums_are_compared_by_size(tmp_path: Path) -> None:
    write(tmp_path / "a.ckpt", "a", 1.0)
    file, manifest = tmp_path / "a.ckpt" / "rank_00000.pt", tmp_path / "a.ckpt" / "manifest.json"
    torch.save({"weight": torch.ones(3)}, file, _use_new_zipfile_serialization=False)
    in_manifest(files={file.name: file.stat().st_size})(manifest)
    verification.verify(tmp_path / "a.ckpt")
    file.write_bytes(b"\x80")
    with pytest.raises(DamagedCheckpointError, match="has 1 bytes"):
        verification.verify(tmp_path / "a.ckpt")
