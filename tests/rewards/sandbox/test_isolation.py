"""The table of docs/security.md is what attacks found, in each situation that this machine can produce."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rlhfkit.rewards.sandbox import confinement, isolation

REPOSITORY = Path(__file__).parents[3]
PROGRAM = Path(__file__).with_name("attacks.py")
TABLE = REPOSITORY / "docs" / "security.md"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems have resource limits only")

CONTAINED = ["setpriv", "--bounding-set", "-all,+chown,+dac_override,+fowner,+kill,+setgid,+setpcap,+setuid"]
USER = ["setpriv", "--reuid", "1500", "--regid", "1500", "--clear-groups"]
REFUSING = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
import confinement
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
assert confinement.install_filter({"landlock_create_ruleset": (444, 444)})
os.execvp(sys.argv[2], sys.argv[2:])
"""
WITHOUT_LANDLOCK = [*USER, "/usr/bin/python3", "-c", REFUSING, str(Path(confinement.__file__).parent)]
"""A command in front of one to which the kernel then refuses Landlock."""

SITUATIONS = {
    "root": ("no", []),
    "root, bubblewrap": ("yes", []),
    "root in a container": ("no", [*CONTAINED, "--inh-caps=-all"]),
    "user": ("no", USER),
    "user, bubblewrap": ("yes", USER),
    "user without Landlock": ("no", WITHOUT_LANDLOCK),
}
"""Columns of the table: whether bubblewrap is used, and the command in front of the trainer."""
NOT_RUN = "macOS"

ROWS = {
    "files that the trainer reads": ["read_data", "other_views"],
    "the trainer's memory": ["read_memory", "read_memory_by_call", "trace"],
    "its environment": ["read_environment"],
    "its open files and sockets": ["open_descriptors", "take_descriptors"],
    "signals to it": ["signal"],
    "files elsewhere written": ["write_outside"],
    "the network": ["connect", "other_networks"],
    "memory beyond the limit": ["memory"],
    "memfd and System V memory": ["uncounted_memory"],
    "processes beyond the limit": ["processes"],
    "a daemon that outlives the call": ["daemon"],
}
"""What an attack reaches, and the attacks that have to fail."""


def processes_of(word: str) -> list[int]:
    """Those in whose command line a word is, which forks inherit."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return found


def found_by_trainer(bubblewrap: str, before: list[str], marker: str) -> dict[str, Any]:
    """What a trainer that is attacked prints; the command ``before`` makes its situation."""
    python = "/usr/bin/python3" if USER[0] in before and USER[1] in before else sys.executable
    probe = [*before, python, "-c", "import sys; assert sys.version_info >= (3, 11)"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("needs setpriv, and for another user than root Python 3.11 as /usr/bin/python3")
    secret = secrets.token_hex(8)
    folder = Path("/var/tmp") / f"rlhfkit-test-{marker}"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "data.jsonl").write_text(secret)
    (folder / "data.jsonl").chmod(0o644)
    command = [*before, python, str(PROGRAM), str(REPOSITORY), str(folder), bubblewrap, secret[::-1], marker]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=dict(os.environ, SECRET_COPY=secret)
        )
        assert ran.stdout, ran.stderr
        return json.loads(ran.stdout) | {"errors": ran.stderr}
    finally:
        shutil.rmtree(folder)


@cache
def attacked(situation: str) -> dict[str, Any]:
    """What came of all attacks; skips where the situation cannot be produced."""
    bubblewrap, before = SITUATIONS[situation]
    if os.geteuid() != 0:
        pytest.skip("situations are produced by root")
    if bubblewrap == "yes" and not isolation.bubblewrap_works():
        pytest.skip("bubblewrap is not installed, or not allowed here")
    marker = f"marker-{secrets.token_hex(8)}"
    found = found_by_trainer(bubblewrap, before, marker)
    assert found["text"], found["errors"]
    blocked = documented()["a daemon that outlives the call"][situation] == "blocked"
    return found | json.loads(found["text"]) | {"daemon": outlives(marker, patience=60 if blocked else 0)}


def outlives(marker: str, patience: float) -> bool:
    """Whether a daemon is still there after so many seconds to end; it is then killed."""
    end = time.monotonic() + patience
    while (left := processes_of(marker)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        os.kill(process, signal.SIGKILL)
    return bool(left)


@cache
def documented() -> dict[str, dict[str, str]]:
    """The table: for each row what holds in each column."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    header = next(line for line in lines if all(name in line for name in SITUATIONS))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[lines.index(header) :]]
    return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[1:] if row[0] in [*ROWS, "refused"]}


@LINUX
@pytest.mark.parametrize(
    "situation", [pytest.param(name, marks=[pytest.mark.long] * (name != "root")) for name in SITUATIONS]
)
def test_what_holds_is_what_the_table_says_and_a_refusal_names_the_missing_layers(situation: str) -> None:
    found = attacked(situation)
    held = {row: "possible" if any(found[attack] for attack in attacks) else "blocked" for row, attacks in ROWS.items()}
    held["refused"] = "yes" if found["refused"] else "no"
    assert held == {row: columns[situation] for row, columns in documented().items()}
    if found["refused"]:
        missing = "does not allow these isolation layers: reads (it reads "
        assert all(words in found["refused"] for words in (missing, "; trainer (", "allow_partial_isolation=True"))


@LINUX
def test_without_a_sandbox_the_attacks_reach_what_they_try_to_reach() -> None:
    """So what is held elsewhere is held by an isolation layer."""
    found = found_by_trainer("nothing", [], "without-a-sandbox")
    assert [attack for attacks in ROWS.values() for attack in attacks if attack != "daemon" and not found[attack]] == []


def test_what_was_not_run_says_so() -> None:
    assert set(documented()) == {*ROWS, "refused"}
    assert {columns[NOT_RUN] for columns in documented().values()} == {"not run"}
