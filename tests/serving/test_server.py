"""A real server on the loopback address: what it admits, how it starts and stops. Covers ``middleware.py`` too."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from waiting import LIMIT, until

from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.server import Server

TOKEN = AccessToken("a-secret-of-24-characters")
release = threading.Event()


async def health(request: Request) -> Response:
    return PlainTextResponse("ok")


async def size(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def wait(request: Request) -> Response:
    while not release.is_set():
        await asyncio.sleep(0.01)
    return PlainTextResponse("done")


def application() -> Starlette:
    return Starlette(routes=[Route("/health", health), Route("/size", size, methods=["POST"]), Route("/wait", wait)])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(application(), token=TOKEN, max_body_bytes=1000, max_concurrent=2) as running:
        yield running


def get(url: str, **arguments: Any) -> httpx.Response:
    return httpx.get(url, timeout=LIMIT, **arguments)


def post(server: Server, content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    """With the token, unless other headers are given."""
    headers = TOKEN.header() if headers is None else headers
    return httpx.post(f"{server.url}/size", content=content, headers=headers, timeout=LIMIT)


def test_a_token_is_asked_for_except_on_the_health_check(server: Server) -> None:
    assert get(f"{server.url}/health").text == "ok"
    assert post(server, b"12345").text == "5"
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}):
        answer = post(server, b"12345", header)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "token" in answer.json()["error"]["message"]
    assert get(f"{server.url}/nothing").status_code == 401  # not even what there is


def test_bodies_are_limited_declared_or_not(server: Server) -> None:
    assert post(server, b"x" * 1000).text == "1000"
    assert post(server, b"x" * 1001).status_code == 413
    assert post(server, iter([b"x" * 100] * 11)).status_code == 413  # chunked: no length is declared


def test_a_body_that_does_not_come_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.middleware, "body_timeout", 0.3)
    header = "POST /size HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nAuthorization: {Authorization}\r\n\r\nabc"
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as connection:
        connection.sendall(header.format(**TOKEN.header()).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_more_requests_than_places_are_told_to_come_back(server: Server) -> None:
    release.clear()
    with ThreadPoolExecutor() as threads:
        try:
            waiting = [threads.submit(get, f"{server.url}/wait", headers=TOKEN.header()) for _ in range(2)]
            until(lambda: server.middleware.active == 2)
            refused = post(server, b"1")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert get(f"{server.url}/health").status_code == 200
        finally:
            release.set()
        assert [answer.result().text for answer in waiting] == ["done", "done"]
    for _ in range(2):  # a client has its answer before the server has finished with the request
        until(lambda: not server.middleware.active)
        assert post(server, b"1").status_code == 200


def test_without_a_token_only_requests_to_this_machine_pass() -> None:
    with Server(application()) as server:
        for name in ("127.0.0.1", "localhost", "[::1]"):
            assert post(server, b"1", {"Host": f"{name}:{server.port}"}).text == "1"
        assert get(f"{server.url}/health", headers={"Host": "rebound.example.org"}).status_code == 400


def test_closing_lets_running_requests_finish_and_frees_the_port() -> None:
    release.clear()
    server = Server(application(), shutdown_timeout=LIMIT).start()

    def nobody_listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", server.port)) != 0

    with ThreadPoolExecutor() as threads:
        running = threads.submit(get, f"{server.url}/wait")
        until(lambda: server.middleware.active)
        closing = threads.submit(server.close)
        until(nobody_listens)
        time.sleep(0.5)  # in which a server that does not wait would end it
        release.set()
        assert running.result().text == "done"
        closing.result()
    with server:  # the same address, once more
        assert get(f"{server.url}/health").text == "ok"


def test_an_address_that_is_taken_or_open_to_others_is_refused(server: Server) -> None:
    with pytest.raises(OSError, match="in use"):
        Server(application(), port=server.port).start()
    with pytest.raises(ValueError, match=r"refusing to listen on '0\.0\.0\.0' without a token"):
        Server(application(), host="0.0.0.0")
    with pytest.raises(ValueError, match="ssl_certfile and ssl_keyfile go together"):
        Server(application(), ssl_certfile="cert.pem")


def test_an_application_that_fails_to_start_is_an_error() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no model"})

    with pytest.raises(RuntimeError, match="failed to start"):
        Server(broken).start()
