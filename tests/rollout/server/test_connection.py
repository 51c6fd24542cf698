"""What ``VLLMServer`` says of servers that are not as it needs them, and which requests it repeats.

The server of these tests is a real one over HTTP that misbehaves; a real vLLM is in ``test_engine.py``.
"""

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.vision_families import prompts, save_vision_model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlhfkit import Prompt, SamplingSpec, VLLMServer
from rlhfkit.models.load import load_config
from rlhfkit.models.vision import image_token_id
from rlhfkit.rollout.errors import EngineError, RequestError
from rlhfkit.rollout.server.connection import ServerConnections, server_options
from rlhfkit.rollout.server.weights import ServerInfo, ServerReceivers, choose_sender
from rlhfkit.serving.access import AccessToken
from rlhfkit.serving.server import Server

SECRET = "a-secret-of-24-characters"
SPEC = SamplingSpec(group_size=2, max_new_tokens=3)
MODEL = {"id": "model", "max_model_len": 64, "parent": None}


def completion(body: dict[str, Any]) -> dict[str, Any]:
    """Tokens that depend on the seed."""
    tokens = [body["seed"] % 100, 7, 8][: body["max_tokens"]] if "seed" in body else [3]
    choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}, "finish_reason": "length"}
    if body.get("prompt_logprobs") is not None:
        entry = {str(token): {"logprob": -2.0, "rank": 1} for token in body["prompt"]}
        choice["prompt_logprobs"] = [None, *[entry] * (len(body["prompt"]) - 1)]
    return {"choices": [choice]}


class Misbehaviour:
    """A server whose answers a test sets; it counts requests by path."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.requests: Counter[str] = Counter()
        self.models: Any = {"data": [MODEL]}
        self.answer: Callable[[dict[str, Any], int], Any] = lambda body, number: completion(body)
        self.crashing: set[str] = set()
        """Paths whose handler raises after the response."""
        self.most = 0
        self.now = 0
        self.together = 0
        """Requests that are in flight before the first is answered."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        request = Request(scope, receive)
        path = scope["path"]
        self.requests[path] += 1
        response: Response = JSONResponse({"detail": "Not Found"}, 404)
        if path == "/v1/models":
            response = JSONResponse(self.models)
        elif path == "/v1/completions":
            self.now += 1
            self.most = max(self.most, self.now)
            while self.most < self.together:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # in which one too many would arrive
            self.now -= 1
            found = self.answer(json.loads(await request.body()), self.requests[path])
            found = await found if inspect.isawaitable(found) else found
            response = found if isinstance(found, Response) else JSONResponse(found)
        elif path in self.crashing:
            response = Response("broken", 500)
        await response(scope, receive, send)
        if path in self.crashing:
            time.sleep(0.2)  # blocks, like the logging of a traceback, before uvicorn closes the connection
            raise RuntimeError("broken")


@pytest.fixture(scope="module")
def running() -> Iterator[Misbehaviour]:
    app = Misbehaviour()
    with Server(app, token=AccessToken(SECRET), shutdown_timeout=1) as server:
        app.url = server.url
        yield app


@pytest.fixture
def app(running: Misbehaviour) -> Misbehaviour:
    running.reset()
    return running


Start = Callable[..., VLLMServer]


@pytest.fixture
def started(app: Misbehaviour, folder: Path) -> Iterator[Start]:
    """Makes engines that only generate."""
    made: list[VLLMServer] = []

    def start(*, model: Path = folder, **arguments: Any) -> VLLMServer:
        arguments = {"urls": app.url, "token": SECRET, "backoff": 0.01, "start_timeout": 60} | arguments
        engine = VLLMServer(**arguments)
        made.append(engine)
        engine.start(str(model), dtype=torch.float32, load_weights=True)
        return engine

    yield start
    for engine in made:
        engine.close()


def test_a_server_that_only_generates_is_refused_where_weights_have_to_be_sent_before_anything_is_generated(
    app: Misbehaviour, folder: Path
) -> None:
    engine = VLLMServer(app.url, token=SECRET)
    with pytest.raises(EngineError, match=r"only generates.*VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer"):
        engine.start(str(folder), dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"before VLLMServer.start, or for servers that only generate"):
        engine.load(None, 1)  # type: ignore[arg-type]


def test_a_token_is_sent_and_its_absence_explained(started: Start) -> None:
    assert len(started().generate([Prompt(0, [5])], SPEC, iteration=0)) == 2
    for token, words in ((None, "no token was sent"), (SECRET[::-1], "is not the server's")):
        with pytest.raises(EngineError, match=words) as raised:
            started(token=token)
        assert SECRET not in str(raised.value)
        assert SECRET[::-1] not in str(raised.value)


@pytest.mark.parametrize(
    ("models", "served", "words"),
    [
        ([MODEL, MODEL | {"id": "other"}], None, r"serves \['model', 'other'\]: served_model=None needs exactly"),
        ([MODEL], "another", r"serves \['model'\]: served_model='another' is not among them"),
        ([{"id": "model"}], None, "does not say its max_model_len"),
    ],
)
def test_another_server(app: Misbehaviour, started: Start, models: list[Any], served: str | None, words: str) -> None:
    app.models = {"data": models}
    with pytest.raises(EngineError, match=words):
        started(served_model=served)


def test_requests_that_failed_for_now_are_repeated_and_give_the_same(app: Misbehaviour, started: Start) -> None:
    engine = started()
    expected = engine.generate([Prompt(0, [5])], SPEC, iteration=0)
    app.reset()
    app.answer = lambda body, number: completion(body) if number > 2 else Response("busy", 500 + number)
    found = engine.generate([Prompt(0, [5])], SPEC, iteration=0)
    assert [sample.token_ids.tolist() for sample in found] == [sample.token_ids.tolist() for sample in expected]
    assert app.requests["/v1/completions"] == 4


def test_a_step_of_a_sync_after_one_that_failed_does_not_use_the_connection_that_the_server_closes(
    app: Misbehaviour,
) -> None:
    app.crashing = {"/finish_weight_update"}
    options = server_options(app.url, concurrency=4, request_timeout=60.0, token=AccessToken(SECRET), retries=5)
    connections = ServerConnections(options)
    receivers = ServerReceivers(connections, [1], timeout=60)
    try:
        for _ in range(3):
            with pytest.raises(EngineError, match="status 500: broken"):
                receivers.submit("abandon_update", doing="").result()
            (server,) = connections.endpoints
            asked = connections.submit(connections.call(server, "GET", "/v1/models", timeout=60))
            assert asked.result() == app.models
    finally:
        connections.close()


async def slow(body: dict[str, Any], number: int) -> dict[str, Any]:
    """Answers later than anybody waits."""
    await asyncio.sleep(600)
    return completion(body)


def said(finish_reason: str) -> dict[str, Any]:
    """One token."""
    choice = {"token_ids": [1], "logprobs": {"token_logprobs": [0.0]}, "finish_reason": finish_reason}
    return {"choices": [choice]}


@pytest.mark.parametrize(
    ("answer", "options", "words"),
    [
        ({"choices": []}, {}, "something else than one completion"),
        ({"choices": [{"text": "a"}]}, {}, "returns no token ids"),
        ({"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [0.0]}}]}, {}, "without a log-prob of each"),
        (said("abort"), {}, "ended a completion with 'abort'"),
        (said("length"), {}, "after 1 of 3 tokens, a limit of its own: start it with --generation-config vllm"),
        (Response("<html>"), {}, "something else than JSON"),
        (Response("out of memory", 500), {"retries": 2}, r"status 500: out of memory; given up after 3 attempt"),
        (slow, {"retries": 0, "request_timeout": 2.0}, r"did not answer within 2 s"),
        (JSONResponse({"error": {"message": "no"}}, 400), {}, "the request was refused"),
    ],
)
def test_what_is_no_answer_of_vllm_ends_the_call(
    app: Misbehaviour, started: Start, answer: Any, options: dict[str, Any], words: str
) -> None:
    engine = started(**options)
    app.answer = answer if callable(answer) and not isinstance(answer, Response) else lambda body, number: answer
    refused = words == "the request was refused"
    with pytest.raises(RequestError if refused else EngineError, match=words):
        engine.generate([Prompt(0, [5])], SPEC, iteration=0)
    if refused:  # and not asked for again: one to begin with, then one of each sample
        assert app.requests["/v1/completions"] <= 3


def test_images_need_a_server_that_takes_them(app: Misbehaviour, started: Start, tmp_path: Path) -> None:
    """As one that was started without ``--enable-scale-out``; with it: ``test_engine.py``."""
    seeing = save_vision_model("idefics3", tmp_path / "seeing")
    engine = started(model=seeing)
    sent: list[Any] = []
    app.answer = lambda body, number: (sent.append(body.get("logit_bias")), completion(body))[1]
    assert engine.image_processor is None
    given = prompts(seeing, several=False)
    with pytest.raises(RequestError, match="or with VLLMServer from one of `vllm serve --enable-scale-out`"):
        engine.generate(given[:1], SPEC, iteration=0)
    assert len(engine.generate(given[2:], SPEC, iteration=0)) == 2
    assert sent == [{str(image_token_id(load_config(str(seeing)))): -100.0}] * 2


def test_requests_in_flight_are_limited(app: Misbehaviour, started: Start) -> None:
    engine = started(concurrency=3)
    app.reset()
    app.together = 3
    samples = engine.generate([Prompt(index, [5]) for index in range(6)], SPEC, iteration=0)
    assert len(samples) == 12
    assert app.most == 3


def test_servers_that_report_other_logprobs_are_refused(app: Misbehaviour, started: Start) -> None:
    """``--logprobs-mode raw_logprobs`` reports those before the temperature, ``processed_logprobs`` those after it."""

    def reporting(server: Misbehaviour, raw: bool) -> str:
        """Have a server report one of the two; returns its address."""

        def answer(body: dict[str, Any], number: int) -> Any:
            given = completion(body)
            top = {"a": -1.0 if raw else -1.0 / (body["temperature"] or 1.0)}
            given["choices"][0]["logprobs"]["top_logprobs"] = [top]
            return given

        server.answer = answer
        return server.url

    warm, other = SamplingSpec(temperature=0.7), Misbehaviour()
    with Server(other, token=AccessToken(SECRET), shutdown_timeout=1) as server:
        other.url = server.url
        engine = started(urls=[app.url, other.url])
        assert engine.configure_logprobs(SamplingSpec())  # at temperature 1 they are the same
        for raw, others in ((True, False), (False, True)):
            before, after = (reporting(app, raw), reporting(other, others))[:: 1 if raw else -1]
            words = rf"before the temperature \({before}\) and those after it \({after}\): .* --logprobs-mode"
            with pytest.raises(EngineError, match=words):
                engine.configure_logprobs(warm)
        for raw in (True, False):
            assert started(urls=[reporting(app, raw), reporting(other, raw)]).configure_logprobs(warm) is not raw


def test_servers_with_vllms_own_transfer_are_refused_with_the_command_that_starts_one_with_ours() -> None:
    infos = [ServerInfo("nccl", "cuda", 1)]
    with pytest.raises(EngineError, match=r"backend 'nccl' are not supported; to train with it, .*\"rlhfkit\""):
        choose_sender(infos, "auto", trainer_has_gpu=True, timeout=1.0, bucket_bytes=1)
