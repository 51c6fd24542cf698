"""Child processes: whatever runs in them, the caller gets an answer in time and nothing is left behind.

Covers ``process.py`` and ``child.py`` too.
"""

import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from rlhfkit.rewards.sandbox import ResourceLimits, SandboxPool, WorkerSpec
from rlhfkit.rewards.sandbox.process import SandboxProcess

from .test_isolation import LINUX, WITHOUT_LANDLOCK, processes_of

CASES = Path(__file__).with_name("misbehaving.py")


def sandbox(**options: Any) -> SandboxPool:
    limits = ResourceLimits(memory_gib=0.5, processes=24)
    work = WorkerSpec(name="the test", program=CASES, factory="look", packages=False)
    return SandboxPool(work, **{"workers": 1, "timeout": 60.0, "limits": limits} | options)


@pytest.fixture
def one() -> Iterator[SandboxPool]:
    made = sandbox()
    yield made
    made.close()


def children() -> set[int]:
    """Of this process, those that have ended and were not waited for included."""
    found = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        found |= set(map(int, listing.read_text().split()))
    return found


def until_gone(folder: str) -> None:
    """Wait until all processes of a sandbox have ended."""
    until(lambda: not processes_of(folder))


def test_a_worker_sees_no_secrets_no_input_a_folder_of_its_own_and_the_network_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network is closed otherwise: ``test_isolation.py``."""
    monkeypatch.setenv("API_TOKEN", "secret")
    opened = sandbox(limits=ResourceLimits(memory_gib=0.5, network=True))
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen = opened.run(server.getsockname()[1]).value
    assert seen["connected"]
    assert "secret" not in str(seen)
    taken_over = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH"}
    assert set(seen["environment"]) <= taken_over | {"HOME", "TMPDIR", "OMP_NUM_THREADS"}
    assert seen["input"] == ""
    assert seen["folder"] == seen["environment"]["HOME"] != os.getcwd()
    assert Path(seen["folder"]).exists()
    opened.close()
    assert not Path(seen["folder"]).exists()


@LINUX
@pytest.mark.parametrize("act", ["fork bomb", "hide"])
def test_all_that_a_call_has_started_is_killed_with_it(one: SandboxPool, act: str) -> None:
    folder = one.run(0).value["folder"]
    assert one.run(act, timeout=4.0).status == "timeout"
    until_gone(folder)
    assert one.run(0).status == "ok"


def test_floods_are_bounded_cost_the_trainer_no_memory_and_leave_the_end_of_what_was_printed(one: SandboxPool) -> None:
    assert one.run(0).status == "ok"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flooded = one.run("flood")
    assert flooded.status == "error"
    assert "ValueError: enough" in flooded.message
    assert flooded.message.endswith("xxxx")
    assert len(flooded.message) < 10_000
    assert one.run("answer for ever").status == "error"
    assert one.run("print for ever", timeout=1.0).status == "timeout"
    assert one.run("large answer").message.strip().endswith("the limit is 1048576")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.long
def test_computing_is_limited_in_each_call() -> None:
    one = sandbox(limits=ResourceLimits(memory_gib=0.5, cpu_seconds=1))
    burnt = one.run("burn")
    assert burnt.status == "error"
    assert "the call has used up its CPU time" in burnt.message
    assert "in burn" in burnt.message
    assert [one.run(0).status for _ in range(2)] == ["ok"] * 2
    one.close()


def test_an_interrupted_call_leaves_no_answer_to_the_next(one: SandboxPool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = one.run(0).value["folder"]

    def interrupt(self: SandboxProcess, sending: memoryview) -> memoryview:
        self._socket.send(sending)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SandboxProcess, "_send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            one.run("raise")
    assert one.processes[0].pid is None
    after = one.run(0)
    assert after.status == "ok"
    assert after.value["folder"] != before


def test_an_answer_is_read_before_its_process_is_known_to_have_ended(
    one: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one.run(0).status == "ok"
    send = SandboxProcess._send

    def send_and_kill(self: SandboxProcess, sending: memoryview) -> memoryview:
        left = send(self, sending)
        assert select.select([self._socket], [], [], 60)[0]
        kill_supervisor(self)  # both have arrived
        return left

    with monkeypatch.context() as patch:
        patch.setattr(SandboxProcess, "_send", send_and_kill)
        assert one.run(0).status == "ok"
    assert one.run(0).status == "ok"


@LINUX
@pytest.mark.long
def test_a_thousand_calls_leak_no_process_and_no_descriptor() -> None:
    before = len(os.listdir("/dev/fd")), children()
    two = sandbox(workers=2)
    folders = set()
    for start in range(0, 1000, 100):
        ends = ["nest folders", "die", "hang"] if start % 500 == 0 else [0] * 3
        outcomes = two.map([0] * 97 + ends, timeout=0.2)
        folders |= {outcome.value["folder"] for outcome in outcomes[:97] if outcome.status == "ok"}
    two.close()
    assert len(folders) >= 4  # two at first, and two that were replaced, twice
    assert not any(Path(folder).exists() for folder in folders)
    assert len(os.listdir("/dev/fd")) < before[0] + 5  # as many as one process needs; six have run
    assert children() <= before[1]
    for folder in folders:
        until_gone(folder)


def kill_supervisor(process: SandboxProcess) -> None:
    """And wait until it has ended."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("confined", [True, False])
def test_a_process_that_was_killed_between_calls_is_replaced(confined: bool) -> None:
    """A worker that is not confined would outlive its supervisor, and its channel stay open."""
    work = WorkerSpec(name="the test", program=CASES, factory="look", packages=False, confined=confined)
    one = SandboxPool(work, workers=1, timeout=60)
    assert one.run(0).status == "ok"
    kill_supervisor(one.processes[0])
    assert one.run(0).status == "ok"
    if not confined:  # and may kill it itself
        folder = one.processes[0]._folder
        assert one.run("kill supervisor").status == "died"
        until_gone(folder)
    one.close()


def test_a_fork_of_the_trainer_that_ends_ends_nothing_else() -> None:
    one = sandbox()
    assert one.run(0).status == "ok"
    supervisor = one.processes[0].pid
    fork = os.fork()
    if fork == 0:
        try:
            del one  # as when Python ends
        finally:
            os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    assert one.run(0).status == "ok"
    assert one.processes[0].pid == supervisor
    one.close()


def test_a_process_that_could_not_be_stopped_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = sandbox(fresh_process=True)
    with monkeypatch.context() as patch:
        patch.setattr(SandboxProcess, "stop", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fresh.run(0)
    assert fresh.run(0).status == "ok"  # it does not wait forever for a free process
    fresh.close()


ALONE = """
import sys, types
for name in ("rlhfkit", "rlhfkit.rewards"):  # as packages without what they import, which takes seconds
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1] + "/" + name.replace(".", "/")]
from pathlib import Path
from rlhfkit.rewards.sandbox import ResourceLimits, SandboxPool, WorkerSpec, process
if sys.argv[4] == "without bubblewrap":
    process.bubblewrap_works = lambda: False
work = WorkerSpec(name="t", program=Path(sys.argv[2]), factory="look", packages=False)
one = SandboxPool(work, workers=1, timeout=30, limits=ResourceLimits(memory_gib=0.5, processes=24))
print(one.run(0).value["folder"], *one.isolation, flush=True)
print(one.run("hide", timeout=float(sys.argv[3])).status, flush=True)
"""


def alone(timeout: float, *before: str) -> subprocess.Popen[str]:
    """A trainer in whose sandbox a process hides."""
    root = str(Path(__file__).parents[3])
    python = "/usr/bin/python3" if before == tuple(WITHOUT_LANDLOCK) else sys.executable
    command = [*before, python, "-c", ALONE, root, str(CASES), str(timeout)]
    command.append("without bubblewrap" if before else "")
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@LINUX
def test_when_the_trainer_is_killed_everything_inside_ends() -> None:
    with alone(60.0) as trainer:
        assert trainer.stdout is not None
        folder = trainer.stdout.readline().split()[0]
        until(Path(folder, "seen").exists)
        trainer.kill()
    until_gone(folder)
    assert not Path(folder).exists()


@LINUX
@pytest.mark.long
def test_the_whole_tree_is_hunted_down_without_any_layer() -> None:
    if os.geteuid() != 0 or subprocess.run([*WITHOUT_LANDLOCK, "true"], capture_output=True).returncode != 0:
        pytest.skip("not root, or without setpriv")
    with alone(2.0, *WITHOUT_LANDLOCK) as trainer:
        assert trainer.stdout is not None
        folder, *layers = trainer.stdout.readline().split()
        assert set(layers) == {"network", "memory"}
        assert trainer.stdout.readline() == "timeout\n"
    until_gone(folder)
    assert not Path(folder).exists()
