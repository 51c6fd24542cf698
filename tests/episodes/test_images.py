"""Episodes, tools and the chat API with images: what the policy samples is what the trainer computes."""

import asyncio
import base64
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lazy_module import LazyModule
from models.vision_families import SIDE, picture, prompts, save_vision_model
from tiny_models import local_engine
from torch import nn

from episodes.episode_cases import runner_of
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.episodes import Action, Environment, Episodes, OpenAIEndpoint, Step
from rlhfkit.episodes.tool_calls import ToolCall
from rlhfkit.episodes.tools import ToolEnvironment
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.models.load import load_tokenizer
from rlhfkit.rollout import LocalEngine, SamplingSpec

openai = LazyModule("openai")
World = tuple[Path, LocalEngine, nn.Module]
SPEC = SamplingSpec(group_size=2, max_new_tokens=5, min_new_tokens=2, stop_token_ids=tuple(range(3, 40)))


@pytest.fixture(scope="module", params=["idefics3", "qwen3_vl"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = save_vision_model(request.param, tmp_path_factory.mktemp("seeing") / "model")
    return folder, local_engine(folder), load_causal_lm(str(folder)).eval()


def check(model: nn.Module, samples: list[Sample]) -> None:
    """Log-probs of what was sampled are those of a forward pass over the whole episode with all of its images."""
    batch = Experience.from_samples(samples, before_rewards=True)
    with torch.no_grad():
        found = policy_output(model, batch, batch.action_mask).logprobs
    torch.testing.assert_close(found, batch.rollout_logprobs, atol=5e-5, rtol=0)


class Showing(Environment):
    """Shows a picture after each of two actions, as tools and users do."""

    def reset(self, prompt: Prompt) -> Any:
        if prompt.index == 1:  # a conversation of its own
            return [{"role": "user", "content": [{"type": "image", "image": picture(9).open()}]}]
        return None

    def step(self, action: Action) -> Step:
        parts = [{"type": "text", "text": f"now {action.turn} "}, {"type": "image", "image": picture(action.turn)}]
        return Step([{"role": "user", "content": parts}], reward=1.0, done=action.turn == 2)


def test_observations_have_images(world: World) -> None:
    folder, engine, model = world
    runner = runner_of(engine, Episodes(Showing, on_error="raise"), folder)
    try:
        samples = runner.generate(prompts(folder, several=False), SPEC, iteration=0)
    finally:
        runner.loop.close()
    for sample in samples:
        first = {0: picture(0), 1: picture(9)}.get(sample.prompt.index)
        assert sample.prompt.attachments == ((first,) if first else ()) + (picture(0), picture(1))
    check(model, samples)


def test_tools_return_images() -> None:
    def look() -> Any:
        return picture(0).open()

    def compare() -> Any:
        return ["both:", picture(1), picture(2).open(), {"equal": False}]

    calls = [ToolCall("look", {}), ToolCall("compare", {})]
    environment = ToolEnvironment([look, compare], tool_call_parser=lambda action: calls)
    found: Any = asyncio.run(environment.step(Action(0, [], "", "", "stop"))).observation
    seen, both = (message["content"] for message in found)
    assert [part["type"] for part in seen] == ["image"]
    assert seen[0]["image"].size == (SIDE, SIDE)
    assert [part["type"] for part in both] == ["text", "image", "image", "text"]
    assert (both[0]["text"], both[3]["text"]) == ("both:", '{"equal": false}')


def asked(*seeds: int) -> dict[str, Any]:
    """A message as clients of OpenAI's API send it."""
    urls = [f"data:image/png;base64,{base64.b64encode(picture(seed).encoded()).decode()}" for seed in seeds]
    pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": "which? "}, *pictures]}


def test_the_chat_api_takes_data_urls(world: World) -> None:
    folder, engine, model = world
    with ExitStack() as stack:
        endpoint = stack.enter_context(OpenAIEndpoint(engine, load_tokenizer(str(folder)), max_context_tokens=400))
        name, session = endpoint.open_session(Prompt(3, [5]), 0, SPEC, iteration=0, max_turns=9)
        client = stack.enter_context(
            openai.OpenAI(base_url=endpoint.base_url(name), api_key=endpoint.api_key, max_retries=0)
        )
        messages = [asked(0)]
        for more in ((1, 2), (3,)):
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(), asked(*more)]
        other = [asked(1), *messages[1:3]]  # another picture: no continuation of what was sampled
        client.chat.completions.create(model="policy", messages=other)
        for url in ("https://example.com/cat.png", "/etc/hostname", "file:///etc/hostname", "data:image/png;base64,?"):
            wrong = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            with pytest.raises(openai.BadRequestError, match="picture"):
                client.chat.completions.create(model="policy", messages=[wrong])
    leaves = [leaf.trajectory.sample("stop", {}) for leaf in session.leaves()]
    assert [leaf.prompt.attachments for leaf in leaves] == [
        (picture(0), picture(1), picture(2)),
        (picture(1), picture(1), picture(2)),
    ]
    check(model, leaves)
