"""Transfers between real processes, of which one dies or is suspended in the middle of a bucket; prints JSON.

All processes of all scenarios are forked before any has threads, and the scenarios run at the same time.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch
from torch import Tensor

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.weight_sync.process_group.rendezvous import Rendezvous
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender, WeightReceiver

TENSORS = 40
INFOS = [WeightInfo(f"layer.{index}", (2**18,), torch.float32) for index in range(TENSORS)]  # 1 MiB each
LATE = 10.0  # seconds until what is suspended is given up
PATIENT = 300.0  # until what is dead would be: not reached
SCENARIOS = {  # who, what happens to it, after how many buckets, the time limit
    "worker dies": (2, signal.SIGKILL, 3, PATIENT),
    "worker is suspended": (2, signal.SIGSTOP, 3, LATE),
    "trainer dies": (0, signal.SIGKILL, 6, PATIENT),
    "trainer is suspended": (0, signal.SIGSTOP, 6, LATE),
}


def values(index: int) -> Tensor:
    return torch.full((2**18,), float(index))


def worker(number: int, scenario: str, commands: Connection, reports: Connection) -> None:
    """Do what the trainer says and report how each command ended, to the trainer and to the main process."""
    who, what, after, _ = SCENARIOS[scenario]
    receiver = WeightReceiver(torch.device("cpu"))
    updates = 0
    while True:
        try:
            command, argument = commands.recv()
        except EOFError:  # the trainer is gone
            os._exit(0)
        start, received = time.monotonic(), 0
        try:
            if command == "connect":
                receiver.join(argument, number - 1)
            else:
                updates += 1
                for tensors, _block in receiver.receive(INFOS):
                    for name, tensor in tensors:
                        assert torch.equal(tensor, values(int(name.split(".")[1])))
                        received += 1
                    if (who, updates) == (number, 1) and received == after:
                        os.kill(os.getpid(), what)
            answer = (command, "", received)
        except Exception as error:
            answer = (command, f"{type(error).__name__}: {error}", received)
        reports.send((f"worker {number}", *answer, round(time.monotonic() - start, 2)))
        try:
            commands.send(answer)
        except OSError:
            os._exit(0)


class Pipes:
    """The workers as the sender sees them."""

    address = "127.0.0.1"

    def __init__(self, pipes: dict[int, Connection]) -> None:
        self.pipes = pipes
        self.timeout = 0.0
        self.unanswered: dict[int, Connection] = {}  # of the last command

    @property
    def num_workers(self) -> int:
        return len(self.pipes)

    def worker(self, rank: int) -> str:
        return f"worker {rank}"

    def connect(self, init_info: dict[str, Any], *, ranked: bool = True) -> "Calls":
        self.timeout = init_info["timeout"]
        return Calls(self, "connect", Rendezvous(**init_info | {"rank_offset": 1}))

    def update(self, update_info: dict[str, Any]) -> "Calls":
        return Calls(self, "update", None)


class Calls:
    """A command to all workers."""

    def __init__(self, workers: Pipes, command: str, argument: Any) -> None:
        self.waiting = workers.unanswered = dict(workers.pipes)
        self.deadline = time.monotonic() + workers.timeout
        for pipe in self.waiting.values():
            pipe.send((command, argument))

    def poll(self, timeout: float = 0.0) -> None:
        ready = wait(list(self.waiting.values()), timeout)
        for number, pipe in list(self.waiting.items()):
            if pipe in ready:
                del self.waiting[number]
                try:
                    _, error, _ = pipe.recv()
                except (EOFError, ConnectionError):
                    raise RuntimeError(f"worker {number} is dead") from None
                if error:
                    raise RuntimeError(f"worker {number}: {error}")

    def result(self) -> list[Any]:
        while self.waiting:
            if time.monotonic() > self.deadline:
                raise RuntimeError(f"late: {sorted(self.waiting)}")
            self.poll(0.1)
        return []


def trainer(scenario: str, pipes: dict[int, Connection], reports: Connection) -> None:
    """Send to both workers, and if that fails to the first alone."""
    who, what, after, limit = SCENARIOS[scenario]

    def weights() -> Iterator[tuple[str, Tensor]]:
        for index, info in enumerate(INFOS):
            if who == 0 and index == after:
                os.kill(os.getpid(), what)
            yield info.name, values(index)

    workers = Pipes(pipes)
    sender = ProcessGroupSender("gloo", timeout=limit, bucket_bytes=2**20)
    sender.connect(workers)
    start = time.monotonic()
    try:
        sender.send(workers, INFOS, weights())
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    sender.close()
    reports.send(("trainer", "update", error, 0, round(time.monotonic() - start, 2)))
    if 1 in workers.unanswered:  # otherwise the trainer's error is that of the first worker
        pipes[1].recv()  # it has noticed as well
    workers.pipes = {1: pipes[1]}
    sender.connect(workers)
    sender.send(workers, INFOS, weights())
    reports.send(("trainer", "again", "", TENSORS, 0.0))
    os._exit(0)


def begin(scenario: str) -> tuple[list[int], list[Connection]]:
    """Fork the three processes of a scenario; returns their ids and where they report."""
    links = {number: Pipe() for number in (1, 2)}
    reports = {number: Pipe(duplex=False) for number in (0, 1, 2)}
    pids = []
    for number in (1, 2, 0):
        pid = os.fork()
        if pid == 0:
            for other, (here, there) in links.items():  # a pipe ends when nobody else has its end open
                if number != 0:
                    here.close()
                if number != other:
                    there.close()
            for reading, writing in reports.values():
                reading.close()
                if writing is not reports[number][1]:
                    writing.close()
            if number:
                worker(number, scenario, links[number][1], reports[number][1])
            trainer(scenario, {n: link[0] for n, link in links.items()}, reports[0][1])
        pids.append(pid)
    for here, there in links.values():
        here.close()
        there.close()
    for _, writing in reports.values():
        writing.close()
    return pids, [reading for reading, _ in reports.values()]


def main() -> None:
    started = {scenario: begin(scenario) for scenario in SCENARIOS}
    open_ends = {reading: scenario for scenario, (_, readings) in started.items() for reading in readings}
    found: dict[str, list[Any]] = {scenario: [] for scenario in SCENARIOS}
    deadline = time.monotonic() + 250
    while open_ends and time.monotonic() < deadline:
        for reading in wait(list(open_ends), 0.5):
            assert isinstance(reading, Connection)
            try:
                found[open_ends[reading]].append(reading.recv())
            except EOFError:
                del open_ends[reading]
        enough = {"worker is suspended": 7, "trainer is suspended": 4}  # what is suspended never closes its end
        if all(len(found[scenario]) >= enough.get(scenario, 0) for scenario in open_ends.values()):
            break
    for pids, _ in started.values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
