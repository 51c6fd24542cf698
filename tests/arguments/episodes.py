"""Engines of episodes, agents and recorded samples on a tiny model, observed for tests of their arguments."""

import asyncio
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import LocalEngine, Sample, SamplingSpec
from rlhfkit.data.types import Prompt
from rlhfkit.episodes import AgentEpisodes
from rlhfkit.episodes.environment import Action, Environment, Step
from rlhfkit.episodes.openai.agents import AgentConnection
from rlhfkit.episodes.tool_calls import ToolCall
from rlhfkit.models.load import load_tokenizer
from rlhfkit.rollout import GroupFunction
from rlhfkit.rollout.groups import GroupRunner
from rlhfkit.rollout.replay import samples_file, save_samples
from rlhfkit.serving.access import AccessToken, ServerOptions

from .table import observed

SAMPLING = SamplingSpec(group_size=2, max_new_tokens=3)
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ style|default('') }}{{ m['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
HELD = socket.socket()
"""Keeps a port for the servers of this process: the kernel gives it to nobody else."""
HELD.bind(("127.0.0.1", 0))
HELD.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, so that they may listen there
PORT = HELD.getsockname()[1]
SECRET = "a-secret-of-24-characters"
TOKEN = AccessToken(SECRET)


def prepare(folder: Path) -> None:
    """A model with a chat template, and samples of two runs."""
    tiny_model(folder / "chat", context=128)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "chat")
    for seed, name in enumerate(("dump", "other_dump")):
        engine = LocalEngine()
        engine.start(str(folder / "chat"), dtype=torch.float32, load_weights=True)
        save_samples(
            samples_file(folder / name, 0), engine.generate(prompts(), replace(SAMPLING, seed=seed), iteration=0)
        )
        engine.close()


def prompts() -> list[Prompt]:
    """Two."""
    return [Prompt(i, tiny_tokenizer()(f"{i}+1=")["input_ids"], f"{i}+1=") for i in range(2)]


class Guests:
    """How many episodes of one prompt there were at the same time, and what agents were told."""

    def __init__(self) -> None:
        self.here: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self.told: set[Any] = set()

    def enter(self, prompt: Prompt) -> None:
        self.here[prompt.index] += 1
        self.most[prompt.index] = max(self.most[prompt.index], self.here[prompt.index])

    def leave(self, prompt: Prompt) -> None:
        self.here[prompt.index] -= 1


guests = Guests()


class Turns(Environment):
    """Answers with the number of the turn, three times."""

    async def reset(self, prompt: Prompt) -> None:
        self.prompt = prompt
        guests.enter(prompt)

    def says(self, action: Action) -> Any:
        return f"<{action.turn}>"

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(0)
        return Step(self.says(action), reward=1.0, done=action.turn == 2)

    async def close(self) -> None:
        guests.leave(self.prompt)


class Chatting(Turns):
    """Answers with messages."""

    def says(self, action: Action) -> Any:
        return [{"role": "user", "content": "?"}]


class Failing(Turns):
    """Fails with the second prompt."""

    def says(self, action: Action) -> Any:
        if self.prompt.index == 1:
            raise ArithmeticError("no such number")
        return super().says(action)


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: Any.
    """
    return 2 * number


def called(action: Action) -> list[ToolCall]:
    """Takes everything for a call."""
    return [ToolCall("double", {"number": 1})]


async def asks(connection: AgentConnection, prompt: Prompt, *, turns: int = 2) -> float:
    """Asks so many times; the reward counts calls of tools."""
    where = urlsplit(connection.base_url)
    port = where.port if where.port == PORT else "any"
    guests.told.add((where.hostname, port, connection.api_key if connection.api_key == SECRET else "random"))
    tools: Any = [{"type": "function", "function": {"name": "double", "parameters": {}}}]
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    calls = 0
    guests.enter(prompt)
    try:
        async with connection.client(max_retries=0) as client:
            for _ in range(turns):
                answer = await client.chat.completions.create(model=connection.model, messages=messages, tools=tools)
                said = answer.choices[0].message
                calls += len(said.tool_calls or ())
                messages += [{"role": "assistant", "content": said.content or ""}, {"role": "user", "content": "?"}]
    finally:
        guests.leave(prompt)
    return float(calls)


async def asks_once(connection: AgentConnection, prompt: Prompt) -> float:
    """One turn."""
    return await asks(connection, prompt, turns=1)


async def fails(connection: AgentConnection, prompt: Prompt) -> float:
    """Fails with the second prompt."""
    if prompt.index == 1:
        raise LookupError("lost")
    return await asks(connection, prompt)


def played(folder: Path, kind: type, arguments: Mapping[str, Any], around: Mapping[str, Any], built: bool) -> Any:
    """Samples of two prompts and how they were made, or the error.

    Args:
        folder: Of :func:`prepare`.
        kind: Of engine.
        arguments: Its arguments; ``@name`` stands for a file.
        around: Nothing.
        built: Only start it.
    """
    global guests
    guests = Guests()

    def play(_: Path, given: dict[str, Any]) -> Any:
        server = {name.removeprefix("server."): given.pop(name) for name in [*given] if name.startswith("server.")}
        made = kind(**given, **({"server": ServerOptions(**server)} if server else {}))
        engine = source = LocalEngine() if isinstance(made, GroupFunction) else made
        model = str(folder / "chat")
        engine.start(model, dtype=torch.float32, load_weights=True)
        try:
            if isinstance(made, GroupFunction):
                made.start(engine, model, dtype=torch.float32)
                source = GroupRunner(engine, made)
                source.configure(load_tokenizer(model), None, model)
            samples = [] if built else source.generate(prompts(), SAMPLING, iteration=0)
            return {"samples": list(map(written, samples)), "most": guests.most, "told": guests.told, **inside(made)}
        finally:
            engine.close()
            source.close()

    return observed(folder, arguments, play)


def written(sample: Sample) -> Any:
    """All of a sample but times."""
    info = {key: sample.info.get(key) for key in ("ended", "reward", "turns", "error", "unused_tokens")}
    return (
        sample.prompt.token_ids.tolist(),
        sample.token_ids.tolist(),
        sample.chosen.tolist(),
        sample.finish_reason,
        sample.reward,
        info,
    )


def inside(made: Any) -> dict[str, Any]:
    """How many calls of the engine there may be, and what is served how."""
    if isinstance(made, AgentEpisodes) and made._endpoint is not None:
        return {"calls": made._endpoint._sampler.parallel_calls, "scheme": urlsplit(made._endpoint.base_url())[0]}
    return {"calls": getattr(made, "parallel_calls", None)}
