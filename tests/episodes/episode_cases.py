"""Shared by tests of episodes: an engine that records its requests, a chat template, small environments."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import chat_tokenizer, tiny_model

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.episodes.environment import Action, Environment, Step
from rlhfkit.models.load import load_tokenizer
from rlhfkit.rollout import GroupFunction, SamplingSpec
from rlhfkit.rollout.groups import GroupRunner

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'][0] + ']' + style|default('') + message['content'] }}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '[a]' }}{% endif %}"
)
"""One letter for the role, an argument, and an end-of-turn token that the model samples, with a line break behind."""


def chat_model(folder: Path, context: int = 512) -> Path:
    """A tiny model with the template."""
    tiny_model(folder, context=context)
    chat_tokenizer(CHAT_TEMPLATE).save_pretrained(folder)
    return folder


class Recorded:
    """An engine that remembers every request and every answer, and how many requests came in one call."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.seen: list[tuple[list[int], list[int]]] = []
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        samples: list[Sample] = self.engine.generate(prompts, sampling, iteration=iteration)
        self.calls.append(len(prompts))
        self.seen += [(sample.prompt.token_ids.tolist(), sample.token_ids.tolist()) for sample in samples]
        return samples


def runner_of(engine: Any, group: GroupFunction, folder: Any, *, load_weights: bool = True) -> GroupRunner:
    """A group function and an engine that serves a model, as in a run."""
    if load_weights:
        engine.start(str(folder), dtype=torch.float32, load_weights=True)
    runner = GroupRunner(engine, group)
    runner.configure(load_tokenizer(str(folder)), None, str(folder))
    return runner


def turns(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """What the policy had read and what it said then, turn by turn, from the record alone."""
    everything, found, said = sample.prompt.token_ids.tolist(), [], []
    chosen = sample.action_mask.tolist()  # type: ignore[union-attr]
    for token, own, following in zip(sample.token_ids.tolist(), chosen, [*chosen[1:], False], strict=True):
        everything.append(token)
        said += [token] * own
        if own and not following:
            found.append((everything[: -len(said)], said))
            said = []
    return found


def check_logprobs(engine: Any, sample: Sample) -> None:
    """Those of trained tokens are the model's of the whole sequence, all others 0."""
    scored = engine.score([sample.all_token_ids.tolist()])[0][sample.prompt.num_tokens - 1 :]
    expected = [score if chosen else 0.0 for score, chosen in zip(scored, sample.chosen.tolist(), strict=True)]
    assert sample.logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def said(text: str) -> Action:
    """The first action of an episode."""
    return Action(0, [1], text, text, "stop")


class Counting(Environment):
    """Answers each turn with its number, for three turns, and pays 1, 2 and 4 for them."""

    def reset(self, prompt: Prompt) -> None:
        self.prompt = prompt

    async def step(self, action: Action) -> Step:
        return Step(f"<{action.turn}>", reward=2.0**action.turn, done=action.turn == 2, info={"turn": action.turn})


class Faulty(Counting):
    """Fails in its second turn as its prompt's answer says, and has been closed afterwards."""

    closed = 0
    lock = threading.Lock()

    def step(self, action: Action) -> Any:
        fault = self.prompt.answer if action.turn == 1 else None
        if fault == "raises":
            raise ArithmeticError("no such number")
        if fault == "hangs":
            threading.Event().wait()
        if fault == "returns nothing":
            return None
        if fault == "says nothing":
            return Step()
        if fault == "not finite":
            return Step("<1>", reward=float("nan"))
        if fault == "no judgement":
            return Step("<1>", reward=None)
        return super().step(action)

    def close(self) -> None:
        with self.lock:
            Faulty.closed += 1
