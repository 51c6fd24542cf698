"""RemoteReward against real servers: right, slow, down, wrong, overloaded and unauthenticated ones.

Covers ``serving.client.py`` and ``wire.py`` too.
"""

import asyncio
import datetime
import ipaddress
import logging
import math
import pickle
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import until

from rewards.samples import scored
from rlhfkit.data import Prompt, Sample
from rlhfkit.data.images import Image
from rlhfkit.rewards import RemoteReward
from rlhfkit.rewards.base import OnFailure, RewardError
from rlhfkit.rewards.remote.wire import OpenRLHFFormat, SampleFormat
from rlhfkit.serving import client
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.client import MAX_RETRY_AFTER, Endpoint, ServerUnavailable, least_outstanding, parse_retry_after
from rlhfkit.serving.server import Server

SECRET = "a-secret-of-24-characters"


def samples(count: int = 7) -> list[Sample]:
    """Completions "x0", "x1" ..., each rewarded with a third of its number, of a prompt with a picture."""
    prompt = Prompt(5, [1, 2], "say", "x3", {"level": 2}, (Image(Path("picture.png")),))
    return [Sample(prompt, i, [3] * i, [0.0] * i, [0] * i, "stop", text=f"x{i}") for i in range(count)]


EXPECTED = [i / 3 for i in range(7)]
WRONG: dict[str, bytes] = {
    "nojson": b"<html>",
    "deep": b"[" * 100_000,
    "list": b"[1, 2]",
    "text": b'{"rewards": "1, 2"}',
    "few": b'{"rewards": [1.0]}',
    "nan": b'{"rewards": [0, NaN, 2, 3, 4, 5, 6]}',
    "large": b'{"rewards": [0, 1' + b"0" * 400 + b", 2, 3, 4, 5, 6]}",
    "words": b'{"rewards": [0, "1", 2, 3, 4, 5, 6]}',
    "truth": b'{"rewards": [0, true, 2, 3, 4, 5, 6]}',
    "null": b'{"rewards": [0, null, 2, 3, 4, 5, 6]}',
    "huge": b" " * 200_000,
}
"""Bodies by the path that answers with them."""


class Misbehaviour:
    """An application whose paths are the ways in which a reward server can be; it counts requests by path."""

    def __init__(self) -> None:
        self.url = ""
        self.application = Starlette(routes=[Route("/{path:path}", self.answer, methods=["POST"])])
        self.forget()

    def forget(self) -> None:
        self.requests: Counter[str] = Counter()
        self.bodies: list[Any] = []

    async def answer(self, request: Request) -> Response:
        kind = request.path_params["path"].split("/")[0]
        self.requests[kind] += 1
        body = await request.json()
        self.bodies.append(body)
        times = self.requests[kind]
        if kind == "slow":
            await asyncio.sleep(0.6)
        if kind == "dripping":  # a byte now and then: no single read takes long
            return StreamingResponse(drip())
        if kind == "busy" and times <= 2:
            return Response(status_code=429, headers={"Retry-After": "1"} if times == 1 else {})
        if kind.isdecimal():
            said = f"no: {request.headers.get('authorization')}"
            return PlainTextResponse(said, int(kind), headers={"Location": "/right/score"})
        if kind in WRONG:
            return Response(WRONG[kind], media_type="application/json")
        return JSONResponse({"rewards": [int(sample["text"][1:]) / 3 for sample in body["samples"]]})


async def drip() -> Any:
    for _ in range(30):
        yield b" "
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def running() -> Iterator[Misbehaviour]:
    app = Misbehaviour()
    with Server(app.application, token=AccessToken(SECRET), shutdown_timeout=1) as server:
        app.url = server.url
        yield app


@pytest.fixture
def app(running: Misbehaviour) -> Misbehaviour:
    running.forget()
    return running


@pytest.fixture
def reward(app: Misbehaviour) -> Callable[..., RemoteReward]:
    """A reward on some of the application's paths, or on other addresses."""

    def make(*kinds: str, **arguments: Any) -> RemoteReward:
        settings = {"token": SECRET, "backoff": 0.01, "timeout": 60.0, "max_response_bytes": 150_000}
        urls = [kind if kind.startswith("http") else f"{app.url}/{kind}" for kind in kinds]
        return RemoteReward(urls, **(settings | arguments))

    return make


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and that nobody else is given."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that rewards want to wait for, which they do not."""
    found: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if threading.current_thread().name == "rlhfkit-reward":
            found.append(seconds)
        else:  # a server
            await real_sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return found


def test_samples_go_out_in_batches_and_rewards_come_back_in_order(reward: Any, app: Misbehaviour) -> None:
    assert scored(reward("right", batch_size=3), samples()) == EXPECTED
    assert sorted(len(body["samples"]) for body in app.bodies) == [1, 3, 3]
    first = next(body["samples"][1] for body in app.bodies if body["samples"][0]["text"] == "x0")
    assert first == {
        "prompt": {"index": 5, "token_ids": [1, 2], "text": "say", "answer": "x3", "metadata": {"level": 2}},
        "sample_index": 1,
        "token_ids": [3],
        "action_mask": None,
        "finish_reason": "stop",
        "text": "x1",
    }
    assert asyncio.run(reward("right")([])) == []


def test_work_is_spread_over_servers(reward: Any, app: Misbehaviour) -> None:
    """Of how many requests are in flight ``tests/rollout/server/test_connection.py`` has the limit."""
    assert scored(reward("one", "two", "three", batch_size=1, concurrency=3), samples()) == EXPECTED
    assert set(app.requests) == {"one", "two", "three"}


def test_null_is_a_sample_without_a_reward(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert scored(reward("null"), samples()) == [0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert not caplog.records


# What goes wrong, how many requests are made of it with two repetitions, and what is said.
BROKEN = [
    ("dripping", 3, "did not answer within 0.2 s"),
    ("503", 3, "answered with status 503: no"),
    ("408", 3, "answered with status 408"),
    ("429", 3, "answered with status 429"),
    ("400", 1, "answered with status 400"),
    ("302", 1, "answered with status 302"),  # not followed
    ("nojson", 1, "answered with '<html>', which is not JSON"),
    ("deep", 1, "which is not JSON"),
    ("huge", 1, "more than 150000 bytes"),
    ("list", 1, 'answered with no {"rewards": [...]}, but [1, 2]'),
    ("text", 1, "rewards that are not a list: 1, 2"),
    ("few", 1, "answered with 1 rewards for 7 samples"),
]


@pytest.mark.parametrize(("kind", "requests", "message"), BROKEN, ids=[kind for kind, *_ in BROKEN])
def test_each_failure_is_tried_again_or_not_and_stops(
    reward: Any, app: Misbehaviour, kind: str, requests: int, message: str
) -> None:
    asked = reward(kind, retries=2, timeout=0.2 if "0.2 s" in message else 60.0)
    with pytest.raises(RewardError) as caught:
        scored(asked, samples())
    assert message in str(caught.value)
    assert f"/{kind}/score" in str(caught.value)
    assert "(for prompt 5, sample 0, completion 'x0')" in str(caught.value)
    assert asked.metrics()["remote_reward/retries"] == requests - 1
    assert app.requests[kind] == requests or "0.2 s" in message  # in which a request may not arrive


@pytest.mark.parametrize(
    ("kind", "shown"), [("nan", "nan"), ("large", "1" + "0" * 79), ("words", "1"), ("truth", "True")]
)
def test_a_wrong_reward_is_the_failure_of_its_sample_only(reward: Any, kind: str, shown: str) -> None:
    with pytest.raises(RewardError, match=rf"/{kind}/score answered with the reward '{shown}'.*sample 1, .*'x1'"):
        scored(reward(kind), samples())
    assert scored(reward(kind, on_failure="mask"), samples()) == [0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(("policy", "value"), [("mask", None), (0, 0.0)])
def test_a_server_that_is_down_is_handled_as_configured(
    reward: Any, nobody: str, policy: OnFailure, value: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = reward(nobody, retries=1, batch_size=4, on_failure=policy)
    assert scored(asked, samples()) == [value] * 7
    became = "are not trained on" if value is None else f"got the reward {value}"
    assert f"7 of 7 samples could not be scored and {became}. {nobody}/score cannot be reached" in caplog.text
    metrics = asked.metrics()
    assert (metrics["remote_reward/failed_fraction"], metrics["remote_reward/retries"]) == (1.0, 2.0)
    assert asked.metrics() == {}


def test_a_busy_server_is_waited_for_as_it_asks(reward: Any, app: Misbehaviour, waits: list[float]) -> None:
    assert scored(reward("busy"), samples()) == EXPECTED
    assert app.requests["busy"] == 3
    asked_for, own = waits
    assert asked_for == 1.0  # Retry-After: 1
    assert 0.02 <= own <= 0.03  # none was asked for


def test_waits_are_doubled_each_time_that_all_servers_have_failed(nobody: str, waits: list[float]) -> None:
    reward = RemoteReward([nobody, f"{nobody}/2"], retries=19, backoff=0.5, on_failure="mask")
    assert scored(reward, samples()) == [None] * 7
    assert waits[::2] == [0.0] * 10  # the other server is asked at once
    for wait, least in zip(waits[1::2], [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0], strict=True):
        assert least <= wait <= least + 0.5


def test_a_single_call_has_a_time_limit_of_its_own(reward: Any) -> None:
    """As a transfer of weights has, which may take longer than a request."""
    options = reward("slow", timeout=0.2).options

    async def asked() -> bytes:
        async with client.HTTPClient("a test", options) as one:
            return await one.call("POST", options.urls[0], b'{"samples": []}', timeout=60)

    assert asyncio.run(asked()) == b'{"rewards":[]}'


@pytest.mark.parametrize(("times", "asked", "least", "most"), [(1, 30.0, 5, 30), (1100, 0.0, 30, 60)])
def test_a_server_that_asked_for_rest_or_failed_a_thousand_times_is_not_the_next_to_be_asked(
    times: int, asked: float, least: int, most: int
) -> None:
    failing, idle = Endpoint("http://127.0.0.1:1"), Endpoint("http://127.0.0.1:2")
    for _ in range(times):
        with pytest.raises(ServerUnavailable), failing.in_use():
            raise ServerUnavailable("busy", retry_after=asked)
    with idle.in_use(), idle.in_use():
        assert least_outstanding([failing, idle], set()) is idle
    assert (failing.outstanding, failing.failures) == (0, times)
    assert least < failing.cooldown_until - time.monotonic() <= most


def test_all_waiting_ends_at_the_time_limit(nobody: str) -> None:
    reward = RemoteReward(nobody, retries=100, backoff=60.0, total_timeout=2.0)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"total_timeout of 2 s is over; before, .* cannot be reached"):
        scored(reward, samples())
    assert time.monotonic() - started < 30


def test_the_secret_is_in_no_log_no_error_and_no_representation(
    reward: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    caplog.set_level(logging.DEBUG)
    asked = reward("400", token=None, token_variable="REWARD_TOKEN", on_failure="mask")  # it repeats the header
    assert scored(asked, samples()) == [None] * 7
    assert "no: Bearer ***" in caplog.text
    with pytest.raises(RewardError) as caught:
        scored(reward("400"), samples())
    scored(reward("right"), samples())
    assert "unencrypted" not in caplog.text
    RemoteReward("http://10.0.0.1:8000", token=SECRET)
    assert "the token for http://10.0.0.1:8000 is sent unencrypted" in caplog.text
    assert SECRET not in caplog.text + str(caught.value) + repr(asked) + str(vars(asked))
    assert SECRET.encode() not in pickle.dumps(asked)
    with pytest.raises(ValueError, match="the address of host must have no user, password or query") as refused:
        RemoteReward("http://user:password@host")
    assert "password@" not in str(refused.value)


def test_proxies_of_the_environment_get_nothing(reward: Any, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", nobody)
    monkeypatch.setenv("ALL_PROXY", nobody)
    assert scored(reward("right", retries=0), samples()) == EXPECTED


def test_certificates_are_verified(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with Server(Misbehaviour().application, ssl_certfile=certificate, ssl_keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with pytest.raises(RewardError, match="certificate verify failed"):
            scored(RemoteReward(server.url, retries=0), samples())
        assert scored(RemoteReward(server.url, retries=0, ssl_ca_certs=str(certificate)), samples()) == EXPECTED


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1, its own authority, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
    )
    return folder / "certificate.pem", folder / "key.pem"


def test_openrlhf_gets_whole_texts() -> None:
    """Its answers are read in ``test_server.py``."""
    expected = {"query": ["sayx0", "sayx1"], "prompts": ["say"] * 2, "labels": ["x3"] * 2}
    assert OpenRLHFFormat().request(samples(2)) == expected


def test_columns_that_json_cannot_hold_are_named_and_can_be_left_out(reward: Any, app: Misbehaviour) -> None:
    given = samples()
    given[0].prompt.metadata["when"] = {1, 2}
    with pytest.raises(ValueError, match=r"first is of prompt 5\): Object of type set .*SampleFormat\(columns="):
        scored(reward("right"), given)
    assert scored(reward("right", wire_format=SampleFormat(columns=["level"])), given) == EXPECTED
    assert app.bodies[0]["samples"][0]["prompt"]["metadata"] == {"level": 2}
    given[0].prompt.metadata["when"] = math.nan
    with pytest.raises(ValueError, match="Choose the columns"):
        scored(reward("right"), given)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (None, 0.0),
        ("Wed, 21 Oct 99999999999999999999 07:28:00 GMT", 0.0),  # OverflowError in datetime
        ("Wed, 21 Oct 2015 07:28:00 +99999999999999999999", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER),
        ("9" * 400, MAX_RETRY_AFTER),
        ("\u0661\u0662", 12.0),
        ("-5", 0.0),
        ("nan", 0.0),
    ],
)
def test_a_malformed_retry_after_asks_for_nothing_and_a_huge_one_for_an_hour(
    header: str | None, seconds: float
) -> None:
    assert parse_retry_after(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert parse_retry_after(date) == pytest.approx(100, abs=30)


def test_calls_leave_no_thread(reward: Any) -> None:
    remote = reward("right", batch_size=2)
    scored(remote, samples())
    before = threading.active_count()
    for _ in range(10):
        scored(remote, samples())
    until(lambda: threading.active_count() <= before)
