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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from waiting import until

from rlhfkit.data import Prompt, Sample
from rlhfkit.data.images import Image
from rlhfkit.rewards import RemoteReward
from rlhfkit.rewards.base import OnFailure, RewardError, score_samples
from rlhfkit.rewards.remote.wire import OpenRLHFFormat, SampleFormat
from rlhfkit.serving import client
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.client import MAX_RETRY_AFTER, Endpoint, ServerUnavailable, least_outstanding, parse_retry_after
from rlhfkit.serving.server import Server

SECRET = "a-secret-of-24-characters"


def samples(count: int = 7) -> list[Sample]:
    """Completions "x0", "x1" ..., each rewarded with a third of its number."""
    prompt = Prompt(5, [1, 2], "say", answer="x3", metadata={"level": 2})
    return [Sample(prompt, i, [3] * i, [0.0] * i, [0] * i, "stop", text=f"x{i}") for i in range(count)]


def right(body: dict[str, Any]) -> list[float]:
    return [int(sample["text"][1:]) / 3 for sample in body["samples"]]


EXPECTED = [i / 3 for i in range(7)]


class Misbehaviour:
    """An application whose paths are the ways in which a reward server can be; it counts requests by path."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.times: list[float] = []
        self.bodies: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        request = Request(scope, receive)
        kind = scope["path"].split("/")[1]
        self.requests[kind] += 1
        self.times.append(time.monotonic())
        body = await request.json()
        self.bodies.append(body)
        await (await self.answer(kind, body, request))(scope, receive, send)

    async def answer(self, kind: str, body: Any, request: Request) -> Response:
        times = self.requests[kind]
        if kind == "slow":
            await asyncio.sleep(0.6)
        if kind == "dripping":  # a byte now and then: no single read takes long
            return StreamingResponse(drip())
        if kind == "busy" and times <= 2:
            return Response(status_code=429, headers={"Retry-After": "1"} if times == 1 else {})
        if kind == "recovers" and times <= 2:
            return Response("not yet", 500 + times)
        if kind.isdecimal():
            return PlainTextResponse(f"no: {request.headers.get('authorization')}", int(kind))
        if kind == "openrlhf":
            rewards = [float(len(query)) for query in body["query"]]
            return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": {}})
        wrong: dict[str, bytes] = {
            "nojson": b"<html>",
            "empty": b"",
            "deep": b"[" * 100_000,
            "list": b"[1, 2]",
            "text": b'{"rewards": "1, 2"}',
            "few": b'{"rewards": [1.0]}',
            "nan": b'{"rewards": [0, NaN, 2, 3, 4, 5, 6]}',
            "infinite": b'{"rewards": [0, 1e999, 2, 3, 4, 5, 6]}',
            "large": b'{"rewards": [0, 1' + b"0" * 400 + b", 2, 3, 4, 5, 6]}",
            "words": b'{"rewards": [0, "1", 2, 3, 4, 5, 6]}',
            "truth": b'{"rewards": [0, true, 2, 3, 4, 5, 6]}',
            "null": b'{"rewards": [0, null, 2, 3, 4, 5, 6]}',
            "huge": b" " * 100_000,
        }
        if kind in wrong:
            return Response(wrong[kind], media_type="application/json")
        return JSONResponse({"rewards": right(body)})


async def drip() -> Any:
    for _ in range(30):
        yield b" "
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Misbehaviour, str]]:
    app = Misbehaviour()
    with Server(app, token=AccessToken(SECRET), shutdown_timeout=1) as server:
        yield app, server.url


@pytest.fixture
def app(running: tuple[Misbehaviour, str]) -> Misbehaviour:
    app = running[0]
    app.requests.clear()
    app.times.clear()
    app.bodies.clear()
    return app


@pytest.fixture
def reward(running: tuple[Misbehaviour, str]) -> Callable[..., RemoteReward]:
    """A reward on some of the application's paths."""

    def make(*kinds: str, **arguments: Any) -> RemoteReward:
        settings = {"token": SECRET, "backoff": 0.01, "timeout": 60.0, "max_response_bytes": 50_000}
        return RemoteReward([f"{running[1]}/{kind}" for kind in kinds], **(settings | arguments))

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


def scored(reward: Any, given: Sequence[Sample]) -> list[float | None]:
    score_samples(reward, given)
    return [sample.reward for sample in given]


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


def test_work_is_spread_over_servers_and_limited(reward: Any, app: Misbehaviour) -> None:
    assert scored(reward("one", "two", "three", batch_size=1, concurrency=3), samples()) == EXPECTED
    assert set(app.requests) == {"one", "two", "three"}
    app.times.clear()
    scored(reward("slow", batch_size=1, concurrency=1), samples(2))
    assert app.times[1] - app.times[0] > 0.55  # the second waited for the first


def test_null_is_a_sample_without_a_reward(reward: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert scored(reward("null"), samples()) == [0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert not caplog.records


# What goes wrong, how many requests are made of it with two repetitions, and what is said.
BROKEN = [
    ("slow", 3, "did not answer within 0.2 s"),
    ("dripping", 3, "did not answer within 0.2 s"),
    ("500", 3, "answered with status 500: no"),
    ("503", 3, "answered with status 503"),
    ("408", 3, "answered with status 408"),
    ("429", 3, "answered with status 429"),
    ("400", 1, "answered with status 400"),
    ("401", 1, "answered with status 401"),
    ("404", 1, "answered with status 404"),
    ("413", 1, "answered with status 413"),
    ("302", 1, "answered with status 302"),
    ("nojson", 1, "answered with '<html>', which is not JSON"),
    ("empty", 1, "which is not JSON"),
    ("deep", 1, "more than 50000 bytes"),
    ("huge", 1, "more than 50000 bytes"),
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


@pytest.mark.parametrize(("kind", "shown"), [("nan", "nan"), ("infinite", "inf"), ("words", "1"), ("truth", "True")])
def test_a_wrong_reward_is_the_failure_of_its_sample_only(reward: Any, kind: str, shown: str) -> None:
    with pytest.raises(RewardError, match=rf"/{kind}/score answered with the reward '{shown}'.*sample 1, .*'x1'"):
        scored(reward(kind), samples())
    assert scored(reward(kind, on_failure="mask"), samples()) == [0.0, None, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert scored(reward("large", on_failure=-1), samples()) == [0.0, -1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_deeply_nested_answer_is_wrong_not_a_crash(reward: Any) -> None:
    with pytest.raises(RewardError, match="which is not JSON"):
        scored(reward("deep", max_response_bytes=10**6), samples())


@pytest.mark.parametrize(("policy", "value"), [("mask", None), (-0.5, -0.5), (0, 0.0)])
def test_a_server_that_is_down_is_handled_as_configured(
    nobody: str, policy: OnFailure, value: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    reward = RemoteReward(nobody, retries=1, backoff=0.01, batch_size=4, on_failure=policy)
    assert scored(reward, samples()) == [value] * 7
    became = "are not trained on" if value is None else f"got the reward {value}"
    assert f"7 of 7 samples could not be scored and {became}. {nobody}/score cannot be reached" in caplog.text
    metrics = reward.metrics()
    assert (metrics["remote_reward/failed_fraction"], metrics["remote_reward/retries"]) == (1.0, 2.0)
    assert reward.metrics() == {}


def test_a_server_that_recovers_is_waited_for(reward: Any, app: Misbehaviour, waits: list[float]) -> None:
    assert scored(reward("recovers"), samples()) == EXPECTED
    assert app.requests["recovers"] == 3
    waits.clear()
    assert scored(reward("busy"), samples()) == EXPECTED
    asked_for, own = waits
    assert asked_for == 1.0  # Retry-After: 1
    assert 0.02 <= own <= 0.03  # none was asked for


def test_another_server_takes_over_at_once(
    reward: Any, app: Misbehaviour, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "COOLDOWN", 60.0)
    two = reward("right", backoff=60.0, batch_size=1, concurrency=2)
    two.options = replace(two.options, urls=[nobody, *two.options.urls])
    started = time.monotonic()
    assert scored(two, samples()) == EXPECTED
    assert time.monotonic() - started < 30  # no back-off while a server is left
    metrics = two.metrics()
    assert 1 <= metrics["remote_reward/retries"] <= 2  # afterwards the dead one is let alone
    assert metrics["remote_reward/failed_fraction"] == 0


def test_waits_are_doubled_each_time_that_all_servers_have_failed(nobody: str, waits: list[float]) -> None:
    reward = RemoteReward([nobody, f"{nobody}/2"], retries=19, backoff=0.5, on_failure="mask")
    assert scored(reward, samples()) == [None] * 7
    assert waits[::2] == [0.0] * 10  # the other server is asked at once
    for wait, least in zip(waits[1::2], [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0], strict=True):
        assert least <= wait <= least + 0.5


def test_a_single_call_has_a_time_limit_of_its_own(running: tuple[Misbehaviour, str]) -> None:
    """As a transfer of weights has, which may take longer than a request."""
    url = f"{running[1]}/slow"
    options = client.ClientOptions(
        urls=url, token=AccessToken(SECRET), concurrency=1, timeout=0.2, retries=0, max_response_bytes=100
    )

    async def asked() -> bytes:
        async with client.HTTPClient("a test", options) as one:
            return await one.call("POST", url, b'{"samples": []}', timeout=60)

    assert asyncio.run(asked()) == b'{"rewards":[]}'


def test_a_server_that_has_failed_a_thousand_times_has_failed_no_worse() -> None:
    dead = Endpoint("http://127.0.0.1:1")
    for _ in range(1100):
        with pytest.raises(ServerUnavailable), dead.in_use():
            raise ServerUnavailable("down")
    assert (dead.outstanding, dead.failures) == (0, 1100)
    assert 30 < dead.cooldown_until - time.monotonic() <= 60


def test_a_server_that_asked_for_rest_is_not_the_next_to_be_asked() -> None:
    busy, idle = Endpoint("http://127.0.0.1:1"), Endpoint("http://127.0.0.1:2")
    with pytest.raises(ServerUnavailable), busy.in_use():
        raise ServerUnavailable("busy", retry_after=30.0)
    with idle.in_use(), idle.in_use():
        assert least_outstanding([busy, idle], set()) is idle
    assert 5 < busy.cooldown_until - time.monotonic() <= 30


def test_all_waiting_ends_at_the_time_limit(nobody: str) -> None:
    reward = RemoteReward(nobody, retries=100, backoff=60.0, total_timeout=2.0)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"total_timeout of 2 s is over; before, .* cannot be reached"):
        scored(reward, samples())
    assert time.monotonic() - started < 30


def test_a_token_is_sent_and_its_absence_refused(running: tuple[Misbehaviour, str], app: Misbehaviour) -> None:
    url = f"{running[1]}/right"
    for wrong in (RemoteReward(url), RemoteReward(url, token="another-one")):
        with pytest.raises(RewardError, match=r"status 401: .*a token is needed"):
            scored(wrong, samples())
    assert not app.requests
    assert scored(RemoteReward(url, on_failure="mask"), samples()) == [None] * 7


def test_the_secret_is_in_no_log_no_error_and_no_representation(
    running: tuple[Misbehaviour, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWARD_TOKEN", SECRET)
    caplog.set_level(logging.DEBUG)
    reward = RemoteReward(f"{running[1]}/400", token_variable="REWARD_TOKEN", on_failure="mask")  # repeats the header
    assert scored(reward, samples()) == [None] * 7
    assert "no: Bearer ***" in caplog.text
    with pytest.raises(RewardError) as caught:
        scored(RemoteReward(f"{running[1]}/400", token=SECRET), samples())
    scored(RemoteReward(f"{running[1]}/right", token=SECRET), samples())
    assert SECRET not in caplog.text + str(caught.value) + repr(reward) + str(vars(reward))
    assert SECRET.encode() not in pickle.dumps(reward)


def test_proxies_of_the_environment_get_nothing(reward: Any, nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", nobody)
    monkeypatch.setenv("ALL_PROXY", nobody)
    assert scored(reward("right", retries=0), samples()) == EXPECTED


def test_certificates_are_verified(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with Server(Misbehaviour(), ssl_certfile=certificate, ssl_keyfile=key) as server:
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


def test_servers_of_openrlhf_are_understood(reward: Any, app: Misbehaviour) -> None:
    assert scored(reward("openrlhf", wire_format=OpenRLHFFormat()), samples(2)) == [5.0, 5.0]
    assert app.bodies == [{"query": ["sayx0", "sayx1"], "prompts": ["say"] * 2, "labels": ["x3"] * 2}]


def test_images_of_prompts_stay_on_this_machine(reward: Any, app: Misbehaviour) -> None:
    given = samples()
    given[0].prompt.attachments = (Image(Path("picture.png")),)
    assert scored(reward("right"), given) == EXPECTED
    assert all("attachments" not in sample["prompt"] for sample in app.bodies[0]["samples"])


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


def test_arguments_are_checked(caplog: pytest.LogCaptureFixture) -> None:
    good = "http://127.0.0.1:8000"
    for urls, message in [
        ([], "at least one address"),
        ("127.0.0.1:8000", "must be like"),
        ("file:///etc/passwd", "must be like"),
        ("http://user:password@host", "the address of host must have no user, password or query"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            RemoteReward(urls)
        assert "password@" not in str(caught.value)
    with pytest.raises(ValueError, match="either the token or"):
        RemoteReward(good, token="a", token_variable="B")
    RemoteReward(good, token=SECRET)
    assert not caplog.records
    RemoteReward("http://10.0.0.1:8000", token=SECRET)
    assert "the token for http://10.0.0.1:8000 is sent unencrypted" in caplog.text


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("soon", 0.0),
        (None, 0.0),
        ("Wed, 21 Oct 99999999999999999999 07:28:00 GMT", 0.0),  # OverflowError in datetime
        ("Wed, 21 Oct 2015 07:28:00 +99999999999999999999", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", MAX_RETRY_AFTER),
        ("9" * 400, MAX_RETRY_AFTER),
        ("\u0661\u0662", 12.0),
        ("-5", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
    ],
)
def test_a_malformed_retry_after_asks_for_nothing_and_a_huge_one_for_an_hour(
    header: str | None, seconds: float
) -> None:
    assert parse_retry_after(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 100))
    assert parse_retry_after(date) == pytest.approx(100, abs=30)


@given(st.text(max_size=60) | st.from_regex(r"[A-Z][a-z]{2}, \d+ [A-Z][a-z]{2} \d+ \d+:\d+:\d+ ([+-]\d+|GMT)"))
@settings(max_examples=25)
def test_no_header_is_an_error(header: str) -> None:
    assert 0.0 <= parse_retry_after(header) <= MAX_RETRY_AFTER


def test_calls_leave_no_thread_and_no_connection(reward: Any, app: Misbehaviour) -> None:
    remote = reward("right", batch_size=2)
    scored(remote, samples())
    before = threading.active_count()
    for _ in range(10):
        scored(remote, samples())
    until(lambda: threading.active_count() <= before)
