"""The real ``openai`` client against the endpoint on a real engine: what is recorded is what the engine saw.

Covers ``session.py`` too.
"""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from lazy_module import LazyModule
from tiny_models import chat_tokenizer, local_engine, tiny_model, tiny_tokenizer
from waiting import LIMIT

from episodes.episode_cases import CHAT_TEMPLATE, Recorded, check_logprobs, turns
from rlhfkit.data.types import Prompt
from rlhfkit.episodes import OpenAIEndpoint
from rlhfkit.episodes.observations import ObservationTokenizer
from rlhfkit.episodes.openai.session import ChatSession
from rlhfkit.episodes.tool_calls import ToolCall
from rlhfkit.rollout import SamplingSpec
from rlhfkit.serving.access import AccessToken, ServerOptions

openai = LazyModule("openai")

USER = {"role": "user", "content": "1+1="}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(local_engine(tiny_model(tmp_path_factory.mktemp("endpoint"), context=256)))


def two_calls(action: Any) -> list[ToolCall]:
    return [ToolCall("f", {"a": 1}), ToolCall("g", {})]


@pytest.fixture(scope="module")
def endpoint(engine: Recorded) -> Iterator[OpenAIEndpoint]:
    with OpenAIEndpoint(
        engine, chat_tokenizer(CHAT_TEMPLATE), max_context_tokens=128, sampling=SamplingSpec(max_new_tokens=6),
        tool_call_parser=two_calls,
        max_body_bytes=10_000, max_body_values=100,
    ) as served:  # fmt: skip
        yield served


@pytest.fixture
def session(endpoint: OpenAIEndpoint, engine: Recorded) -> Iterator[tuple[Any, ChatSession]]:
    """A client in a session of its own."""
    name, session = endpoint.open_session(
        Prompt(7, [5], "1+1="), 2, SamplingSpec(max_new_tokens=6), iteration=3, max_turns=4
    )  # fmt: skip
    engine.seen.clear()
    with openai.OpenAI(base_url=endpoint.base_url(name), api_key=endpoint.api_key, max_retries=0) as client:
        yield client, session
    endpoint.close_session(name)


def ask(client: Any, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **options)


def test_a_conversation_is_recorded_as_the_engine_saw_it(session: Any, engine: Recorded) -> None:
    client, recorded = session
    messages: list[Any] = [{"role": "system", "content": "!"}, USER]
    for turn in range(3):
        answer = ask(client, messages)
        # What agents send back: the whole message, or its text.
        reply = answer.choices[0].message
        messages.append(
            reply.model_dump() if turn % 2 else {"role": "assistant", "content": f" {reply.content.strip()}\n"}
        )
        messages.append({"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "text", "text": "?"}]})
    sample = recorded.sample("stop", 0.5, {})
    assert turns(sample) == engine.seen
    *_, (read, said) = turns(sample)
    assert len(engine.seen) == 3
    assert said == sample.token_ids.tolist()[-len(said) :]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(read), len(said))
    written = tiny_tokenizer().decode(sample.prompt.token_ids.tolist())
    assert written == "[s]!<eos>\n[u]1+1=<eos>\n[a]"
    assert sample.token_rewards.tolist()[-1] == sum(sample.token_rewards.tolist()) == 0.5
    assert sample.info == {
        "turns": 3, "trajectories": 1, "unused_tokens": 0, "last_text": answer.choices[0].message.content,
        "environment_tokens": sample.action_mask.tolist().count(False),
    }  # fmt: skip
    check_logprobs(engine, sample)


def test_retries_branches_and_other_conversations_are_told_apart(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client, recorded = session
    first = ask(client, [USER]).choices[0].message
    again = ask(client, [USER]).choices[0].message
    assert first.content != again.content  # another seed
    go_on = {"role": "user", "content": "go on"}
    ask(client, [USER, {"role": "assistant", "content": again.content}, go_on])
    with caplog.at_level(logging.WARNING):
        ask(client, [USER, {"role": "assistant", "content": "I was rewritten"}, go_on])
    assert "an agent has sent back an answer that is not what was sampled" in caplog.text
    assert [turn.parent for turn in recorded.turns] == [None, None, recorded.turns[1], None]
    assert recorded.leaves() == [recorded.turns[0], recorded.turns[2], recorded.turns[3]]
    sample = recorded.sample("stop", None, {})
    assert sample.info["trajectories"] == 3
    assert sample.info["turns"] == 2
    every = sum(len(turn.trajectory.last_action.token_ids.tolist()) for turn in recorded.turns)
    assert sample.info["unused_tokens"] == every - sum(sample.action_mask.tolist()) > 0
    with pytest.raises(openai.BadRequestError, match="the episode has used its 4 turns"):
        ask(client, [USER])
    assert recorded.limit == "turns"


def test_tools_are_called_as_clients_expect_it(session: Any) -> None:
    client, recorded = session
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
    answer = ask(client, [USER], tools=tools)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert [(one.function.name, one.function.arguments) for one in choice.message.tool_calls] == [
        ("f", '{"a": 1}'), ("g", "{}"),
    ]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": one.id, "content": "4"} for one in choice.message.tool_calls]
    ask(client, [USER, choice.message, *results], tools=tools)
    assert recorded.turns[1].parent is recorded.turns[0]
    assert "[t]4<eos>\n[t]4<eos>\n[a]" in tiny_tokenizer().decode(recorded.turns[1].trajectory.token_ids)
    assert ask(client, [USER], tools=tools, tool_choice="none").choices[0].message.tool_calls is None
    said, end = ask(client, [USER], tools=tools, stream=True)
    assert [(one.index, one.function.name) for one in said.choices[0].delta.tool_calls] == [(0, "f"), (1, "g")]
    assert end.choices[0].finish_reason == "tool_calls"


def test_streams_and_logprobs_say_the_same(session: Any) -> None:
    client, recorded = session
    *said, end = ask(client, [USER], stream=True)
    assert end.choices[0].finish_reason in ("stop", "length")
    text = "".join(chunk.choices[0].delta.content for chunk in said)
    sampled = recorded.turns[0].trajectory.last_action
    assert text == tiny_tokenizer().decode(sampled.token_ids.tolist(), skip_special_tokens=True)
    answer = ask(client, [USER], logprobs=True, max_tokens=3)
    assert [one.logprob for one in answer.choices[0].logprobs.content] == recorded.turns[1].trajectory.logprobs
    assert answer.usage.completion_tokens <= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": []}, "messages"),
        ({"n": 2}, "n: Input should be 1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "LocalEngine has no grammars"),
        ({"response_format": {"type": "grammar"}}, "response_format is"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format is"),
        ({"messages": [USER, {"role": "assistant", "content": "2"}]}, "nothing to answer"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "pictures"),
        ({"messages": [{"content": "x"}]}, "needs a role"),
        ({"messages": [{"role": "user", "content": "x" * 130}]}, "138 tokens; the limit is 128"),
    ],
)
def test_requests_that_cannot_be_honoured_are_refused(session: Any, options: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        ask(session[0], **({"messages": [USER]} | options))
    assert session[1].turns == []


def test_what_clients_say_of_sampling_is_not_used_and_said_so(
    session: Any, endpoint: OpenAIEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = session
    endpoint._warned.clear()
    with caplog.at_level(logging.WARNING):
        ask(client, [USER], temperature=0.1, seed=3)
    assert "requests set seed, temperature, which is ignored" in caplog.text
    assert ask(client, [USER], stop=["\x00"]).choices


def test_without_a_session_it_answers_and_records_nothing(endpoint: OpenAIEndpoint) -> None:
    with openai.OpenAI(base_url=endpoint.base_url(), api_key=endpoint.api_key) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        assert ask(client, [USER]).choices[0].finish_reason in ("stop", "length")


def test_nobody_gets_in_without_the_token(endpoint: OpenAIEndpoint) -> None:
    with (
        openai.OpenAI(base_url=endpoint.base_url(), api_key=endpoint.api_key + "x", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        ask(client, [USER])
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    unknown = httpx.post(f"{endpoint.base_url('guessed')}/chat/completions", headers=headers, json={"messages": [USER]})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_not_found")


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({"public_url": "https://a:1/"}, "https://a:1"),
        ({"port": 99, "ssl_certfile": "one.pem", "ssl_keyfile": "two.pem"}, "https://127.0.0.1:99"),
    ],
)
def test_agents_are_told_the_address_that_others_reach(engine: Recorded, options: Any, address: str) -> None:
    options = ServerOptions(host="0.0.0.0", token=AccessToken("x" * 32), **options)
    endpoint = OpenAIEndpoint(engine, chat_tokenizer(CHAT_TEMPLATE), max_context_tokens=128, server=options)
    assert endpoint.base_url() == f"{address}/v1"
    assert endpoint.base_url("b") == f"{address}/sessions/b/v1"


def test_an_answer_that_takes_too_long_is_an_error(engine: Recorded) -> None:
    with (
        OpenAIEndpoint(engine, chat_tokenizer(CHAT_TEMPLATE), max_context_tokens=128, request_timeout=1e-6) as endpoint,
        openai.OpenAI(base_url=endpoint.base_url(), api_key=endpoint.api_key, max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="no answer within 1e-06 s"),
    ):
        ask(client, [USER])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"messages":[' + b'{"role":"user"},' * 50 + b'{"role":"user"}]}', 413, "more than 100 texts, lists and"),
        (b'{"messages":[{"role":"user","content":"' + b"x" * 20_000, 413, ""),
        (b'{"messages":[{"role":"user"', 400, "Invalid JSON"),
    ],
)
def test_bodies_are_limited_before_they_are_parsed(
    endpoint: OpenAIEndpoint, body: bytes, status: int, message: str
) -> None:
    """What counts: ``serving/test_json_body.py``."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    answer = httpx.post(f"{endpoint.base_url()}/chat/completions", content=body, headers=headers)
    assert answer.status_code == status
    assert message in answer.text


def test_a_long_conversation_is_encoded_off_the_loop_and_refused_for_its_length(
    engine: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts take the tokenizer seconds, in which others are to be answered."""
    begun, answered, encode = threading.Event(), threading.Event(), ObservationTokenizer.encode_conversation

    def slowly(self: Any, messages: Any, **arguments: Any) -> list[int]:
        begun.set()
        assert answered.wait(LIMIT), "nobody else is answered meanwhile"
        return encode(self, messages, **arguments)

    monkeypatch.setattr(ObservationTokenizer, "encode_conversation", slowly)
    with OpenAIEndpoint(engine, chat_tokenizer(CHAT_TEMPLATE), max_context_tokens=128) as endpoint:
        client = httpx.Client(headers={"Authorization": f"Bearer {endpoint.api_key}"}, timeout=2 * LIMIT)
        body = {"messages": [{"role": "user", "content": "1+" * 50_000}]}
        with ThreadPoolExecutor() as threads:
            long = threads.submit(client.post, f"{endpoint.base_url()}/chat/completions", json=body)
            assert begun.wait(LIMIT)
            assert client.get(f"{endpoint.base_url()}/models").status_code == 200
            answered.set()
        assert long.result().status_code == 400
        assert long.result().json()["error"]["code"] == "context_length_exceeded"
