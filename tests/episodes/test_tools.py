"""Tools: calls as models write them, results as models read them, errors in between. Covers ``json_limits.py``."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_models import prompts_of, tiny_tokenizer

from episodes.episode_cases import chat_model, runner_of, said
from rlhfkit.episodes import Action, Episodes, ToolEnvironment, tool_schemas
from rlhfkit.episodes.tool_calls import ToolCall
from rlhfkit.rollout import LocalEngine, SamplingSpec


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: First one.
        b: Second one.
    """
    return a * b


async def search(text: str) -> dict[str, Any]:
    """Search.

    Args:
        text: What for.
    """
    await asyncio.sleep(0)
    return {"found": [text]}


def fail() -> str:
    """Fail."""
    raise LookupError("nothing there")


def hang() -> None:
    """Hang."""
    threading.Event().wait()


def shout() -> str:
    """Say very much."""
    return "x" * 1000


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_every_call_has_a_result_or_is_told_what_is_wrong() -> None:
    tools = ToolEnvironment([multiply, search, fail, hang, shout], timeout=2.0, max_result_characters=60)
    text = "".join(
        [
            call("multiply", '{"a": 3}'),
            call("search", '{"text": "cats"}'),
            call("fail"),
            call("hang"),
            call("shout"),
            call("divide"),
            call("multiply", '{"c": 3}'),
            "<tool_call>oh</tool_call>",
        ]
    )
    step = asyncio.run(tools.step(said(text)))
    assert [message["role"] for message in step.observation] == ["tool"] * 8  # type: ignore[union-attr, index, call-overload]
    contents = [message["content"] for message in step.observation]  # type: ignore[union-attr, index, call-overload]
    assert contents[:3] == ["6", '{"found": ["cats"]}', "Error: LookupError: nothing there"]
    assert contents[3] == "Error: TimeoutError: tool hang took longer than 2 s"
    assert contents[4] == f"{'x' * 60}... (940 more characters)"
    assert contents[5] == "Error: there is no tool 'divide'; there are multiply, search, fail, hang, shout"
    assert contents[6].startswith("Error: multiply: ")
    assert contents[7].startswith("Error: the tool call is not valid JSON")
    assert (step.done, step.reward, step.info) == (False, 0.0, {"tool_calls": 8, "tool_errors": 5})


def test_an_answer_ends_the_episode_and_may_be_rewarded() -> None:
    class Rewarded(ToolEnvironment):
        async def answer_reward(self, action: Action) -> float:
            return float(len(action.text))

    step = asyncio.run(Rewarded([multiply]).step(said("six")))
    assert (step.done, step.reward) == (True, 3.0)


def test_schemas_are_those_of_transformers() -> None:
    (schema,) = tool_schemas([multiply])
    assert schema["function"]["name"] == "multiply"
    assert schema["function"]["parameters"]["required"] == ["a"]

    def bare(x):  # type: ignore[no-untyped-def]
        return x

    with pytest.raises(ValueError, match="tool 'bare' needs type hints and a docstring"):
        tool_schemas([bare])


def test_the_policy_reads_results_as_the_template_writes_them(tmp_path: Path) -> None:
    """A random model calls no tool, so it is the parser that does."""

    def parse(action: Action) -> list[ToolCall]:
        return [ToolCall("multiply", {"a": len(action.token_ids)})] if action.turn == 0 else []

    group = Episodes(tools=[multiply], tool_call_parser=parse, max_turns=2)
    runner = runner_of(LocalEngine(), group, chat_model(tmp_path))
    samples = runner.generate(prompts_of(["a", "b"]), SamplingSpec(group_size=2, max_new_tokens=4), iteration=0)
    runner.close()
    for sample in samples:
        assert "<eos>\n[t]8<eos>\n[a]" in tiny_tokenizer().decode(sample.token_ids.tolist())
        assert sample.info["steps"] == [{"tool_calls": 1, "tool_errors": 0}, {}]
        assert sample.info["environment_tokens"] in (10, 11)  # an end that was sampled is not written again
