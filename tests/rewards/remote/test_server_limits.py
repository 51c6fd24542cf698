"""One request can neither use up a reward server's memory nor block its health check. Covers ``remote/server.py``."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import httpx
import psutil
import pytest

from rlhfkit.rewards.remote.server import MEMORY_PER_BODY_BYTE

MIB = 2**20
SIZE = 62 * MIB  # a little less than the limit of a body


def filled(head: bytes, part: bytes, tail: bytes, *, size: int = SIZE) -> bytes:
    return head + part * ((size - len(head) - len(tail)) // len(part)) + tail


ONE = b'{"samples":[{"prompt":{'


@cache
def bodies() -> dict[str, tuple[bytes, int, str]]:
    """By what is in them: the body, the status of the answer and a part of its text."""
    return {
        "empty samples": (
            filled(b'{"samples":[', b'{"prompt":{}},', b'{"prompt":{}}]}'), 413, "the body holds more than"
        ),
        "few values, many samples": (
            b'{"samples":[' + b'{"prompt":{}},' * 2000 + b'{"prompt":{}}]}', 413, "has 2001 samples, the limit is 1024"
        ),
        "deep nesting": (filled(ONE + b'"answer":', b"[", b""), 413, "nests more than 64"),
        "tokens": (filled(ONE + b'"token_ids":[', b"7,", b"7]}}]}"), 413, "the body holds more than"),
        "more tokens than a request may have": (
            filled(ONE + b'"token_ids":[', b"300,", b"7]}}]}", size=5 * MIB), 413, "more than 1048576 tokens"
        ),
        "as many objects that nobody reads as are taken": (
            filled(ONE + b'"metadata":{"a":[', b'{"a":0},', b"0]}}}]}", size=MIB // 2), 200, ""
        ),
        "a text": (filled(b'{"samples":[{"prompt":{},"text":"', b"a", b'"}]}'), 413, "more than 1048576 tokens"),
        "escapes": (filled(ONE + b'"answer":"', b'\\"', b'"}}]}'), 200, ""),
        "a wide text": (filled(ONE + b'"answer":"\xf0\x9f\x98\x80', b"a", b'"}}]}'), 200, ""),
        "spaces": (filled(ONE + b'"answer":0', b" ", b"}}]}"), 200, ""),
        "a text that does not end": (filled(ONE + b'"answer":"', b'\\"', b""), 422, "does not end"),
        "a number of many digits": (filled(ONE + b'"answer":', b"9", b"}}]}"), 422, "out of range"),
    }  # fmt: skip


PROGRAM = """
from rlhfkit.rewards.remote.server import reward_app
from rlhfkit.serving.server import Server
Server(reward_app(lambda samples: [0.0] * len(samples))).run(ready=lambda url: print(url, flush=True))
"""


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[str, psutil.Process]]:
    """A server in a process of its own, whose memory can be measured."""
    server = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), psutil.Process(server.pid)
    finally:
        server.kill()
        server.wait()


def slowest_health(url: str, ended: threading.Event) -> float:
    """The longest time that an answer about the server's health took meanwhile."""
    slowest = 0.0
    with httpx.Client(base_url=url, timeout=600) as client:
        while not ended.wait(0.02):
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
    return slowest


@pytest.mark.long
def test_no_body_takes_more_memory_than_is_promised_or_keeps_the_health_check_waiting(
    process: tuple[str, psutil.Process],
) -> None:
    url, server = process
    httpx.post(f"{url}/score", json={"samples": []})
    before = server.memory_info().rss
    for name, (body, status, message) in bodies().items():
        for _ in range(3):  # a machine with other work to do delays anybody now and then, but not three times
            started, ended = time.monotonic(), threading.Event()
            with ThreadPoolExecutor() as threads:
                health = threads.submit(slowest_health, url, ended)
                try:
                    header = {"Content-Type": "application/json"}
                    answer = httpx.post(f"{url}/score", content=body, headers=header, timeout=600)
                finally:
                    ended.set()
                slowest = health.result()
            assert (answer.status_code, message in answer.text) == (status, True), (name, answer.text[:300])
            if slowest < max(1.0, (time.monotonic() - started) / 2):  # or as long as it reads the body
                break
        else:
            pytest.fail(f"{name}: /health took {slowest:.2f} s")
        with open(f"/proc/{server.pid}/status") as said:
            peak = next(int(line.split()[1]) for line in said if line.startswith("VmHWM")) * 1024
        assert peak - before < MEMORY_PER_BODY_BYTE * len(body) + 64 * MIB or len(body) < MIB, (name, peak >> 20)
    assert peak - before < 1024 * MIB  # all of them, one after the other
