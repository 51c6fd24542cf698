"""Messages of clients are read or refused, and sampled answers are recognised."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfkit.episodes.openai.protocol import (
    ChatError,
    assistant_message,
    normalize_message,
    same_message,
)
from rlhfkit.episodes.tool_calls import ToolCall

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
PARTS = ("role", "content", "tool_calls", "name", "tool_call_id", "function", "arguments", "type", "text")


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(
        st.sampled_from(PARTS),
        JSON | st.lists(st.dictionaries(st.sampled_from(PARTS), JSON, max_size=4), max_size=2),
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
)
def test_any_json_is_read_or_refused(message: dict[str, Any], has_role: bool, images: bool) -> None:
    try:
        read = normalize_message(message | ({"role": "user"} if has_role else {}), images=images)
    except ChatError:  # and nothing else
        return
    assert isinstance(read["content"], str)  # no picture is drawn
    assert same_message(read, normalize_message(read))


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=20), st.lists(st.builds(ToolCall, st.text(), st.dictionaries(st.text(), JSON)), max_size=2))
def test_an_answer_is_recognised_when_it_comes_back(text: str, calls: list[ToolCall]) -> None:
    reply = assistant_message(text, calls, "x")
    back = json.loads(json.dumps(reply)) | {"refusal": None, "audio": None}
    if back["content"] is not None:
        back["content"] = f"\n {back['content']}\t"
    for call in back.get("tool_calls", ()):
        call["id"] = "renamed"
    assert same_message(normalize_message(reply), normalize_message(back))
    assert not same_message(normalize_message(reply), normalize_message(back | {"content": f"{text}!"}))


@pytest.mark.parametrize(
    "change",
    [{"role": "user"}, {"content": "other"}, {"tool_calls": []}, {"tool_calls": [{"function": {"name": "g"}}]}],
)
def test_other_messages_are_others(change: dict[str, Any]) -> None:
    reply = assistant_message("so <tool_call>", [ToolCall("f", {"a": 1})], "x")
    assert not same_message(normalize_message(reply), normalize_message(reply | change))
