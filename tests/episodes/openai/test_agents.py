"""Agents that use OpenAI's API make samples: exact, independent of each other, also when some of them fail."""

import asyncio
import importlib.util
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from lazy_module import LazyModule
from tiny_models import chat_tokenizer, prompts_of, tiny_tokenizer

from episodes.episode_cases import CHAT_TEMPLATE, Recorded, chat_model, runner_of
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.episodes import Action, AgentEpisodes
from rlhfkit.episodes.openai.agents import AgentConnection
from rlhfkit.episodes.tool_calls import ToolCall
from rlhfkit.rewards import EnvironmentReward
from rlhfkit.rewards.base import score_samples
from rlhfkit.rollout import LocalEngine, SamplingSpec
from rlhfkit.rollout.groups import GroupError, GroupRunner
from rlhfkit.serving.access import AccessToken, ServerOptions

openai = LazyModule("openai")

SAMPLING = SamplingSpec(group_size=2, max_new_tokens=5)


async def talker(connection: AgentConnection, prompt: Prompt) -> float:
    """Two turns; the reward is how many characters were said."""
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    said = 0
    async with connection.client(max_retries=0) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(model=connection.model, messages=messages)
            said += len(answer.choices[0].message.content)
            messages += [answer.choices[0].message, {"role": "user", "content": "?"}]
    return float(said)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GroupRunner]:
    model = chat_model(tmp_path_factory.mktemp("agents"), context=256)
    one = runner_of(Recorded(LocalEngine()), AgentEpisodes(talker, episode_timeout=120), model)
    yield one
    one.close()


def run(runner: GroupRunner, agent: Any, prompts: list[Prompt], **settings: Any) -> list[Sample]:
    """With another agent and other settings for this once."""
    group: Any = runner.function
    group._slots.clear()
    with mock.patch.multiple(group, agent=agent, **settings):
        return runner.generate(prompts, SAMPLING, iteration=1)


def test_samples_are_what_the_engine_saw(runner: GroupRunner) -> None:
    seen = runner.engine.seen  # type: ignore[attr-defined]
    seen.clear()
    samples = run(runner, talker, prompts_of(["1+1=", "abc"]))
    score_samples(EnvironmentReward(), samples)
    assert [(sample.prompt.index, sample.sample_index) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for sample in samples:
        assert sample.prompt.text in ("1+1=", "abc")  # for rewards, as it was
        last = sample.token_ids.tolist()[-sample.action_mask.tolist()[::-1].index(False) :]  # type: ignore[index, union-attr]
        everything = sample.all_token_ids.tolist()
        assert (everything[: -len(last)], last) in seen
        assert sample.info["turns"] == 2
        text = tiny_tokenizer().decode(sample.token_ids.tolist(), skip_special_tokens=True)
        assert sample.reward == len(text) - len("\n[u]?\n[a]")


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def test_samples_do_not_depend_on_how_many_agents_run_at_once_nor_on_the_order_of_their_requests(
    runner: GroupRunner,
) -> None:
    delays = 0

    async def crowd(connection: AgentConnection, prompt: Prompt) -> float:
        """Asks several things at once."""

        async def one(number: int) -> None:
            await asyncio.sleep(0.01 * (number + delays) % 0.03)
            message = {"role": "user", "content": prompt.text + str(number)}
            await client.chat.completions.create(model="policy", messages=[message], max_tokens=3 + number)

        async with connection.client() as client:
            await asyncio.gather(*map(one, range(3)))
        return 1.0

    prompts = prompts_of(["1", "22", "333"])
    whole = run(runner, crowd, prompts)
    assert {sample.info["trajectories"] for sample in whole} == {3}
    delays = 1
    assert tokens(run(runner, crowd, prompts)) == tokens(whole)
    assert tokens(run(runner, crowd, prompts, concurrency=1)) == tokens(whole)
    assert tokens(run(runner, crowd, prompts[2:])) == tokens(whole)[4:]


def test_agents_that_fail_lose_their_own_episode_only_and_none_goes_on_once_it_is_over(runner: GroupRunner) -> None:
    connections: list[AgentConnection] = []

    def agent(connection: AgentConnection, prompt: Prompt) -> float | None:
        """A plain function, with the client of plain functions."""
        connections.append(connection)
        if prompt.text == "silent":
            return 1.0
        said = "x" * 300 if prompt.text == "says too much" else "?"
        with openai.OpenAI(base_url=connection.base_url, api_key=connection.api_key, max_retries=0) as client:
            for turn in range(5 if prompt.text == "talks on" else 1):
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"{turn}{said}"}])
        if prompt.text == "raises":
            raise LookupError("lost")
        if prompt.text == "hangs":
            threading.Event().wait()
        return None if prompt.text == "no judgement" else 1.0

    kinds = ["good", "silent", "raises", "hangs", "no judgement", "talks on", "says too much"]
    samples = run(runner, agent, prompts_of(kinds), episode_timeout=10.0, max_turns=3)
    score_samples(EnvironmentReward(), samples)
    found = {s.prompt.text: (s.info["ended"], s.finish_reason, s.reward, s.info["turns"]) for s in samples}
    assert found == {
        "good": ("done", "stop", 1.0, 1),
        "silent": ("error", "abort", None, 0),
        "raises": ("error", "abort", None, 1),
        "hangs": ("time", "abort", None, 1),
        "no judgement": ("done", "stop", None, 1),
        "talks on": ("turns", "length", None, 1),  # and was answered with an error, which it did not catch
        "says too much": ("tokens", "length", None, 0),
    }
    assert samples[2].token_ids.tolist() == []
    assert "sent no request" in samples[2].info["error"]
    late = connections[0]
    assert late.api_key not in repr(late)
    with (
        openai.OpenAI(base_url=late.base_url, api_key=late.api_key, max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="has ended"),
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(GroupError, match=r"all 4 episodes failed.*LookupError: lost"):
        run(runner, agent, prompts_of(["raises", "raises"]))


def no_calls(action: Action) -> list[ToolCall]:
    return []


def test_arguments_reach_those_who_heed_them(runner: GroupRunner) -> None:
    """What they do there: ``test_endpoint.py`` and ``test_episodes.py``."""
    token = AccessToken("a-secret-of-24-characters")
    common = {"max_turns": 3, "max_episode_tokens": 64, "episode_timeout": 9.0, "concurrency": 5, "on_error": "raise"}
    group = AgentEpisodes(
        talker, **common, request_timeout=7.0, parallel_calls=3, server=ServerOptions(host="127.0.0.2", token=token),
        tool_call_parser=no_calls, chat_template_kwargs={"style": "~"},
    )  # fmt: skip
    found = {name: getattr(group, name) for name in common if name != "max_episode_tokens"}
    assert found | {"max_episode_tokens": group.max_model_len} == common
    group.configure_tokenizer(chat_tokenizer(CHAT_TEMPLATE), {"style": "?"})
    endpoint = group.endpoint(SimpleNamespace(engine=runner.engine, max_tokens=64))  # type: ignore[arg-type]
    group.close()
    assert endpoint.base_url().startswith("http://127.0.0.2:")
    assert endpoint.api_key == "a-secret-of-24-characters"
    assert (endpoint.max_context_tokens, endpoint.request_timeout, endpoint._sampler.parallel_calls) == (64, 7.0, 3)
    assert endpoint.tool_call_parser is no_calls
    written = endpoint.observations.encode_conversation([{"role": "user", "content": "1"}])
    assert tiny_tokenizer().decode(written) == "[u]~1<eos>\n[a]"


def test_it_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(AgentEpisodes(talker))).agent is talker


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need fastapi and uvicorn.*rlhfkit\[agents\]"):
        AgentEpisodes(talker)
    with pytest.raises(ImportError, match="need openai"):
        AgentConnection("http://127.0.0.1:1/v1", "key").client()
