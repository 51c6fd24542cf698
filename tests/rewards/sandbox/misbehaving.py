"""Rewards that do what each sample's text says, most of it bad. Imported by sandboxes, so it imports little."""

import asyncio
import ctypes
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class CannotBePickled(Exception):
    def __init__(self, text: str, lock: object) -> None:
        super().__init__(text)
        self.lock = lock

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def hang() -> None:
    """For longer than any test, and then not back to what follows."""
    time.sleep(300)
    os._exit(1)


def burn() -> None:
    while True:
        pass


def fork_bomb() -> None:
    """A file says that no more processes can be made."""
    while True:
        try:
            os.fork()
        except OSError:
            Path("seen").touch()
            time.sleep(0.01)


def hide_from_killers() -> None:
    """A grandchild in a session of its own, whose parent has ended; a file says that it is there."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.closerange(3, 64)
        Path("seen").touch()
    hang()


def kill_supervisor() -> None:
    """The process that watches over us."""
    os.kill(os.getppid(), 9)
    hang()


def flood() -> None:
    for _ in range(200):
        os.write(1, b"x" * 65536)
    raise ValueError("enough")


def answer_for_ever() -> None:
    """An answer of no bytes that does not end, wherever one may be written."""
    for _ in range(1000):
        for descriptor in range(3, 1024):
            try:
                os.write(descriptor, b"\x00" * (1 << 16))
            except OSError:
                continue
    hang()


def print_for_ever() -> None:
    """From a process that outlives its parents where it can, too."""
    if os.fork() == 0:
        os.setsid()
    while True:
        os.write(2, b"x" * (1 << 16))


def nest_folders() -> None:
    """Deeper than Python recurses."""
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")


# What follows is about the channel of answers.

raw_fork = ctypes.CDLL(None).fork
"""A fork that Python does not know of, so that none of its hooks run."""


def write_everywhere(message: bytes) -> None:
    for descriptor in range(3, 256):
        try:
            os.set_blocking(descriptor, False)
            os.write(descriptor, message)
        except OSError:
            continue


def forge() -> None:
    """Write a well-formed answer into whatever is open."""
    answer = b'{"status": "ok", "value": {"values": [1000.0], "parts": [{}], "metrics": {}}}'
    write_everywhere(struct.pack(">16sQ", b"", len(answer)) + answer)


def later(act: Callable[[], None]) -> None:
    threading.Timer(0.01, act).start()


class ChildReturns(Exception):
    """Raised in a child to leave the reward as an ordinary call would."""


def in_child(fork: Callable[[], int], act: Callable[[], Any]) -> None:
    if fork() == 0:
        act()
        raise ChildReturns


def take_over() -> None:
    """Change what later calls in this interpreter give."""
    globals()["float"] = lambda text: 1000.0


ATTACKS_ON_THE_CHANNEL: dict[str, Callable[[], Any]] = {
    "fork and return": lambda: in_child(os.fork, bool),
    "fork and answer": lambda: in_child(os.fork, forge),
    "raw fork and return": lambda: in_child(raw_fork, bool),
    "raw fork and answer": lambda: in_child(raw_fork, forge),
    "a byte too many": lambda: write_everywhere(b"\0"),
    "an answer before": forge,
    "an answer after": lambda: later(forge),
    "close low ones": lambda: os.closerange(3, 100),
    "close all": lambda: os.closerange(0, 256),
    "close all later": lambda: later(lambda: os.closerange(0, 256)),
    "exit later": lambda: later(lambda: os._exit(3)),
}
ACTS: dict[str, Callable[[], Any]] = {
    "hang": hang,
    "burn": burn,
    "fork bomb": fork_bomb,
    "kill supervisor": kill_supervisor,
    "hide": hide_from_killers,
    "flood": flood,
    "answer for ever": answer_for_ever,
    "print for ever": print_for_ever,
    "nest folders": nest_folders,
    "die": lambda: os._exit(7),
    "leave": lambda: sys.exit(0),
    "raise": lambda: (_ for _ in ()).throw(CannotBePickled("no answer in this text", time)),
    "take over": take_over,
    **ATTACKS_ON_THE_CHANNEL,
}
RETURNS = {"nan": float("nan"), "text": "high", "none": None}


def reward(samples: list[Any]) -> list[Any]:
    """The number that each text ends with, or what else it says, after what its beginning, up to ``|``, says."""
    values = []
    for sample in samples:
        act, _, rest = sample.text.partition("|")
        number = rest if act in ACTS else act
        try:
            if act in ACTS:
                ACTS[act]()
        except ChildReturns:
            values.append(1000.0)  # in a child: must never arrive
        else:
            values.append(RETURNS[number] if number in RETURNS else float(number))
    return values if "twice" not in [sample.prompt.answer for sample in samples] else values * 2


async def reward_later(samples: list[Any]) -> list[Any]:
    """The same, awaited."""
    await asyncio.sleep(0)
    return reward(samples)


class Patient:
    """Waits for training to go on; it imports nothing of rlhfkit."""

    name = "patient"
    step = 0

    def set_progress(self, *, step: int, epoch: int) -> None:
        self.step = step

    def __call__(self, samples: list[Any]) -> list[float]:
        return [float(self.step)] * len(samples)

    def metrics(self) -> dict[str, float]:
        return {"patient/steps": self.step}


def look(layers: list[str]) -> Callable[[Any], dict[str, Any]]:
    """Factory of a worker that acts, or tells what it sees; for :class:`SandboxPool`."""
    return seen


def seen(job: Any) -> dict[str, Any]:
    if job in ACTS:
        ACTS[job]()
    try:
        socket.create_connection(("127.0.0.1", job), 5).close()
        connected = True
    except (OSError, TypeError):
        connected = False
    if job == "large answer":
        return {"large": "x" * (1 << 20)}
    return {
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "input": sys.stdin.read(),
        "connected": connected,
    }


def of_no_judge(layers: list[str]) -> Any:
    """Factory of a worker that has been taken over."""
    return lambda job: 7.0
