"""A reward whose samples fork, print, close, flood and write into the channel of answers. Imported by sandboxes."""

import ctypes
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

raw_fork = ctypes.CDLL(None).fork
"""A fork that Python does not know of, so that none of its hooks run."""


def answer_everywhere(message: bytes) -> None:
    """Write into whatever is open."""
    for descriptor in range(3, 256):
        try:
            os.set_blocking(descriptor, False)
            os.write(descriptor, message)
        except OSError:
            continue


def forged(number: bytes = b"\0" * 16, answer: bytes = b'{"status": "ok", "value": [1000.0]}') -> bytes:
    """A well-formed answer, in the trainer's format and in the one it had before."""
    return number + struct.pack(">Q", len(answer)) + answer


def later(act: Callable[[], None], seconds: float) -> None:
    threading.Timer(seconds, act).start()


def flood() -> None:
    for _ in range(50):
        os.write(2, b"x" * 65536)


def in_child(fork: Callable[[], int], act: Callable[[], Any]) -> None:
    if fork() == 0:
        act()
        raise ValueError("in a child")


def close(lowest: int, highest: int) -> None:
    os.closerange(lowest, highest)


class ChildReturns(Exception):
    """Raised in a child to leave the reward as an ordinary call would."""


def child_returns(fork: Callable[[], int]) -> None:
    if fork() == 0:
        raise ChildReturns


def take_over() -> None:
    """Change what later calls in this interpreter give."""
    globals()["float"] = lambda text: 1000.0


ACTS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "fork and raise": lambda: in_child(os.fork, lambda: None),
    "fork and return": lambda: child_returns(os.fork),
    "fork, wait, raise": lambda: in_child(os.fork, lambda: time.sleep(0.02)),
    "fork and print": lambda: in_child(os.fork, flood),
    "fork and answer": lambda: in_child(os.fork, lambda: answer_everywhere(forged())),
    "raw fork and raise": lambda: in_child(raw_fork, lambda: None),
    "raw fork and return": lambda: child_returns(raw_fork),
    "raw fork and answer": lambda: in_child(raw_fork, lambda: answer_everywhere(forged())),
    "raw fork, answer later": lambda: in_child(raw_fork, lambda: (time.sleep(0.02), answer_everywhere(forged()))),
    "print": flood,
    "a byte too many": lambda: answer_everywhere(b"\0"),
    "an answer before": lambda: answer_everywhere(forged()),
    "old answer before": lambda: answer_everywhere(forged(b"")),
    "an answer after": lambda: later(lambda: answer_everywhere(forged()), 0.01),
    "an endless answer": lambda: later(lambda: [answer_everywhere(b"\0" * 65536) for _ in range(50)], 0.0),
    "close low ones": lambda: close(3, 100),
    "close all": lambda: close(0, 256),
    "close all later": lambda: later(lambda: close(0, 256), 0.01),
    "raise": lambda: 1 / 0,
    "exit": lambda: os._exit(3),
    "exit later": lambda: later(lambda: os._exit(3), 0.01),
}


def reward_that_can_be_taken_over(samples: list[Any]) -> list[float]:
    """The same, in an interpreter that a sample may change."""
    if samples[0].text.startswith("take over"):
        take_over()
        return [0.0]
    return reward(samples)


def reward(samples: list[Any]) -> list[float]:
    """The number at the end of each text, after what its beginning says has been done."""

    def values() -> Iterator[float]:
        for sample in samples:
            act, _, number = sample.text.partition("|")
            try:
                ACTS[act]()
            except ChildReturns:
                yield 1000.0  # in a child: must never arrive
            else:
                yield float(number)

    return list(values())
