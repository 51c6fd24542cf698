"""Unfinished checkpoints of killed processes are removed at the next start; those of running processes are not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhfkit.checkpoints.files import OWNER, partial_path, remove_abandoned, write_owner


def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def unfinished(folder: Path, *, pid: int | None = None, host: str | None = None) -> Path:
    """A checkpoint that is being written, by this process unless told."""
    (folder / "policy" / "checkpoint").mkdir(parents=True)
    (folder / "rank_00000.pt").write_text("state")
    write_owner(folder)
    owner = json.loads((folder / OWNER).read_text())
    changes = {"pid": pid, "host": host}
    (folder / OWNER).write_text(json.dumps(owner | {key: value for key, value in changes.items() if value is not None}))
    return folder


def age(path: Path, days: float) -> None:
    """Make it look older than it is."""
    moment = time.time() - days * 86400
    for one in (path, *path.rglob("*")):
        os.utime(one, (moment, moment))


def test_leftovers_of_dead_processes_go_and_everything_else_stays(tmp_path: Path) -> None:
    dead, alive = str(dead_process()), str(os.getppid())
    gone = [
        unfinished(tmp_path / "a.ckpt.tmp", pid=int(dead)),
        unfinished(tmp_path / "b.ckpt.tmp", host="elsewhere"),
        tmp_path / "c.ckpt.old",
        tmp_path / partial_path(Path("d.ckpt")).name.replace(str(os.getpid()), dead),
        tmp_path / partial_path(Path("i.ckpt")).name.replace(str(os.getpid()), dead),
    ]
    age(gone[1], days=2)
    for name in ("c.ckpt", "c.ckpt.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    gone[3].write_text("half a file")
    (gone[4] / "policy" / "checkpoint").mkdir(parents=True)  # a checkpoint, half of which has been deleted

    stays = [
        unfinished(tmp_path / "e.ckpt.tmp", pid=int(alive)),
        unfinished(tmp_path / "f.ckpt.tmp", host="elsewhere"),
        tmp_path / "notes.tmp",
        tmp_path / "c.ckpt",
        tmp_path / "g.ckpt.old",
        tmp_path / partial_path(Path("h.ckpt")).name.replace(str(os.getpid()), alive),
        tmp_path / "mine.tmp",
        tmp_path / "c.ckpt.mine.old",
    ]
    stays[2].write_text("of the user")
    stays[4].mkdir()  # nothing has taken its place
    (stays[4] / "manifest.json").write_text("{}")
    stays[5].write_text("half a file")
    for folder in stays[6:]:
        folder.mkdir()
        (folder / "thesis.tex").write_text("of the user")
        age(folder, days=2)

    assert sorted(remove_abandoned(tmp_path)) == sorted(gone)
    assert sorted(tmp_path.iterdir()) == sorted(stays)
    assert remove_abandoned(tmp_path / "nowhere") == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"host": 1, "pid": "x"}'])
def test_an_unreadable_owner_is_one_of_another_machine(tmp_path: Path, content: str) -> None:
    folder = unfinished(tmp_path / "a.ckpt.tmp")
    (folder / OWNER).write_text(content)
    assert remove_abandoned(tmp_path) == []
    age(folder, days=2)
    assert remove_abandoned(tmp_path) == [folder]
