"""Processes that die or hang inside a broadcast over gloo: the others end in time, and go on without them.

Covers ``waiting.py`` and ``rendezvous.py`` too.
"""

import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks
from torch import Tensor
from waiting import has_ended, until

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.process_group.rendezvous import Rendezvous
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender, WeightReceiver

TENSORS = 40
INFOS = [WeightInfo(f"layer.{index}", (2**18,), torch.float32) for index in range(TENSORS)]  # 1 MiB each
LATE = 10.0
"""Seconds until what is suspended is given up."""
PATIENT = 300.0
"""Until what is dead would be: it is not waited for."""
SCENARIOS = {  # who (0: the trainer), what happens to it, after how many buckets, and what the others say then
    "worker dies": (2, signal.SIGKILL, 3, {0: "^RuntimeError: worker 2 is dead$", 1: "has given up sending weights"}),
    # The worker that still runs waits as long for the next block as the trainer does, and may be the first to say so.
    # What it says if the trainer hangs: test_sender.py.
    "worker is suspended": (2, signal.SIGSTOP, 3, {0: f"is late|not come from the trainer within {LATE:g} s", 1: ""}),
    "trainer dies": (0, signal.SIGKILL, 6, dict.fromkeys((1, 2), r"the trainer at 127\.0\.0\.1:\d+ is gone")),
}


def limit_of(what: signal.Signals) -> float:
    return PATIENT if what is signal.SIGKILL else LATE


def values(index: int) -> Tensor:
    return torch.full((2**18,), float(index))


class Workers:
    """The workers as the sender sees them, which tell each other by files: what is asked, and what was answered."""

    address = "127.0.0.1"
    turn = 0

    def __init__(self, folder: Path, pids: dict[int, int]) -> None:
        self.folder, self.pids = folder, pids

    @property
    def num_workers(self) -> int:
        return len(self.pids)

    def worker(self, rank: int) -> str:
        return f"worker {rank}"

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> "Workers":
        self.turn, self.timeout = self.turn + 1, init_info["timeout"]
        write(self.folder / f"group {self.turn}", init_info)
        return self._ask("joined")

    def update(self, update_info: dict[str, Any]) -> "Workers":
        return self._ask("received")

    def _ask(self, what: str) -> "Workers":
        self.deadline = time.monotonic() + self.timeout
        self.answers = {number: self.folder / f"{what} {self.turn} {number}" for number in self.pids}
        return self

    def poll(self) -> None:
        for number, answer in self.answers.items():
            if not answer.exists() and has_ended(self.pids[number]):
                raise RuntimeError(f"worker {number} is dead")
            if answer.exists() and (error := json.loads(answer.read_text())):
                raise RuntimeError(f"worker {number}: {error}")

    def result(self) -> list[Any]:
        while not all(answer.exists() for answer in self.answers.values()):
            self.poll()
            if time.monotonic() > self.deadline:
                raise RuntimeError("a worker is late")
            time.sleep(0.1)
        self.poll()
        return []


def write(path: Path, value: Any) -> None:
    """At once, for those who look whether it is there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def attempt(step: Any, *arguments: Any) -> tuple[str, float]:
    """The error of a call, and the seconds it took."""
    start, error = time.monotonic(), ""
    try:
        step(*arguments)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return error, time.monotonic() - start


def train(scenario: str, folder: Path, pids: dict[int, int]) -> None:
    """Send to both workers, and if that fails to the first alone."""
    who, what, after, _ = SCENARIOS[scenario]

    def weights() -> Iterator[tuple[str, Tensor]]:
        for index, info in enumerate(INFOS):
            if who == 0 and index == after:
                os.kill(os.getpid(), what)
            yield info.name, values(index)

    workers = Workers(folder, pids)
    sender = ProcessGroupSender("gloo", timeout=limit_of(what), bucket_bytes=2**20)
    sender.connect(workers)
    error, seconds = attempt(sender.send, workers, INFOS, weights())
    sender.close()
    until((folder / "received 1 1").exists)  # it has noticed as well
    workers.pids = {1: pids[1]}
    sender.connect(workers)
    sender.send(workers, INFOS, weights())
    write(folder / "report 0", [(error, 0, seconds)])


def work(scenario: str, folder: Path, number: int) -> None:
    """Receive what the trainer sends, twice if it lives."""
    who, what, after, _ = SCENARIOS[scenario]
    receiver, report = WeightReceiver(torch.device("cpu")), []
    for turn in (1,) if who == 0 else (1, 2):
        until((folder / f"group {turn}").exists)
        group = json.loads((folder / f"group {turn}").read_text())
        receiver.join(Rendezvous(**group | {"rank_offset": 1}), number - 1)
        write(folder / f"joined {turn} {number}", "")
        received: list[str] = []
        error, seconds = attempt(receive, receiver, received, after if who == number else 0, what)
        report.append((error, len(received), seconds))
        write(folder / f"received {turn} {number}", error)
    write(folder / f"report {number}", report)


def receive(receiver: WeightReceiver, received: list[str], last: int, what: signal.Signals) -> None:
    """Note the names of the tensors that arrive; with the last one this process is struck."""
    for count, (tensors, _) in enumerate(receiver.receive(INFOS), start=1):
        for name, tensor in tensors:
            assert torch.equal(tensor, values(int(name.split(".")[1])))
            received.append(name)
        if count == last:
            os.kill(os.getpid(), what)


def all_scenarios(folder: Path) -> None:
    """Entry point of a rank: forks the processes of all scenarios before any has threads, and asks the survivors."""
    kind, started, reports = multiprocessing.get_context("fork").Process, [], {}
    for scenario, (_, _, _, says) in SCENARIOS.items():
        place = folder / scenario
        place.mkdir()
        workers = {number: kind(target=work, args=(scenario, place, number)) for number in (1, 2)}
        for process in workers.values():
            process.start()
        pids = {number: process.pid for number, process in workers.items()}
        trainer = kind(target=train, args=(scenario, place, pids))
        trainer.start()
        started += [*workers.values(), trainer]
        reports |= {(scenario, number): place / f"report {number}" for number in says}
    try:
        until(lambda: all(path.exists() for path in reports.values()), limit=250)
    finally:
        for process in started:
            process.kill()
    for (scenario, number), path in reports.items():
        who, what, _, says = SCENARIOS[scenario]
        (error, received, seconds), *again = json.loads(path.read_text())
        assert re.search(says[number], error), (scenario, number)
        assert received < TENSORS
        # On any machine: what is dead is not waited for.
        assert seconds < (PATIENT / 2 if what is signal.SIGKILL else LATE + 60.0), (scenario, number)
        assert what is signal.SIGKILL or seconds >= LATE or number != 0, (scenario, number)
        if who != 0 != number:  # the first worker is sent to again
            assert [one[:2] for one in again] == [["", TENSORS]], (scenario, number)


@pytest.mark.distributed
def test_a_process_that_dies_is_noticed_at_once_and_one_that_hangs_after_the_time_limit(tmp_path: Path) -> None:
    ranks.run("rollout.weight_sync.process_group.test_deaths:all_scenarios", 1, tmp_path)
