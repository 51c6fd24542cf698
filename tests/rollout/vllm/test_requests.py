"""A bad request fails alone: whatever it holds, the engines live, and other requests are answered.

Covers ``SamplingSpec`` and the checks in ``rollout/engine.py``.
"""

import asyncio
import itertools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from episodes.episode_cases import CHAT_TEMPLATE
from shared_pool import SharedPool
from tiny_models import chat_tokenizer, local_engine, tiny_model

from rlhfkit.data.types import Prompt
from rlhfkit.episodes import OpenAIEndpoint
from rlhfkit.rollout import LocalEngine, ModuleWeights, SamplingSpec
from rlhfkit.rollout.errors import EngineFailure, RequestError
from rlhfkit.rollout.request_batcher import RequestBatcher
from rlhfkit.rollout.supervision.calls import fetch
from rlhfkit.rollout.vllm.arguments import sample_request
from rollout.vllm.test_pool import load_trainer_model

VOCABULARY = 128
WILD: list[Any] = [
    None, True, -1, 0, 1, 2, -(2**40), 2**31, 2**70, 0.0, -0.5, 0.5, 1.5, math.nan, math.inf, -math.inf, 1e-300, 1e300,
    "", "x", "\ud800", [], [""], ["a", ""], [None], [-1], [5], [VOCABULARY], [2**40], [0.5], [True], {}, {"a": 1}, b"x",
]  # fmt: skip
"""For every field: what is right for some of them, and what is right for none."""


class TestSamplingSpec:
    """Arguments are checked where they are written."""

    def test_one_stop_text_is_one_text(self) -> None:
        assert SamplingSpec(stop="##").stop == ("##",)
        assert SamplingSpec(stop=["##", "\n\n"]).stop == ("##", "\n\n")

    def test_a_schema_is_the_same_however_it_is_given(self) -> None:
        given = SamplingSpec(json_schema={"type": "object", "a": 1})
        assert given == SamplingSpec(json_schema='{"a": 1, "type": "object"}')
        assert hash(given)

    def test_what_is_accepted_is_of_the_promised_types_and_what_is_not_names_the_field(self) -> None:
        refusals = []
        for fields, _ in combinations():
            try:
                spec = SamplingSpec(**fields)
            except (TypeError, ValueError) as error:
                refusals.append(str(error))
                continue
            assert all(isinstance(text, str) and text for text in spec.stop)
            assert all(type(token) is int and token >= 0 for token in spec.stop_token_ids)
            assert all(math.isfinite(getattr(spec, name)) for name in ("temperature", "top_p", "min_p"))
        assert all(message.startswith("SamplingSpec.") for message in refusals)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    """An engine in this process."""
    return local_engine(tiny_model(tmp_path_factory.mktemp("requests"), context=256))


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**40])
def test_tokens_that_the_model_does_not_know_are_refused_before_anything_is_sampled(
    local: LocalEngine, token: int
) -> None:
    with pytest.raises(RequestError, match=rf"prompt 3 has the token {token!r}, and the model knows .* 0 to 127"):
        local.generate([Prompt(2, [5]), Prompt(3, [5, token])], SamplingSpec(max_new_tokens=2), iteration=0)
    spec = SamplingSpec(max_new_tokens=2, stop_token_ids=(VOCABULARY,))
    with pytest.raises(RequestError, match=r"SamplingSpec\.stop_token_ids has the token 128"):
        local.generate([Prompt(0, [5])], spec, iteration=0)


@pytest.mark.parametrize("token", [-1, 2**40, 0.5, "5"])
def test_what_is_no_token_is_not_scored(local: LocalEngine, token: Any) -> None:
    with pytest.raises(RequestError, match="a sequence to be scored has the token"):
        local.score([[5, 6], [5, token]])


def test_of_requests_that_share_a_call_only_the_wrong_one_fails(local: LocalEngine) -> None:
    spec = SamplingSpec(group_size=1, max_new_tokens=4)
    prompts = [Prompt(index, ids) for index, ids in enumerate([[5, 6], [5, -1], [7], [8] * 300])]

    async def run() -> list[Any]:
        sampler = RequestBatcher(local)  # one call at a time, with all that wait
        sampler.requesters.count = 4
        asked = [sampler.ask(prompt, spec, iteration=0) for prompt in prompts]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(run())
    assert [isinstance(answer, RequestError) for answer in answers] == [False, True, False, True]
    alone = local.generate(prompts[2:3], spec, iteration=0)
    assert answers[2][0].token_ids.tolist() == alone[0].token_ids.tolist()


@pytest.fixture
def pool(vllm_pool: SharedPool, vllm_model: Path) -> Iterator[SharedPool]:
    """The shared engines, which must be the same processes afterwards and answer."""
    vllm_pool.load(ModuleWeights(load_trainer_model(vllm_model)), 0)
    before = processes(vllm_pool)
    yield vllm_pool
    assert processes(vllm_pool) == before, "an engine died of a request"
    assert len(vllm_pool.generate([Prompt(0, [10])], SamplingSpec(max_new_tokens=2), iteration=0)) == 8
    vllm_pool.score([[10, 11, 12]])  # both engines


def processes(pool: SharedPool) -> list[tuple[int, int]]:
    """Process and number of restarts of every engine."""
    assert pool.engines is not None
    return [(handle.info["pid"], handle.restarts) for handle in pool.engines.handles]


@pytest.mark.vllm
@pytest.mark.ray
class TestVLLM:
    """Real engines under requests of any content."""

    def test_no_sampling_specification_and_no_prompt_ends_an_engine(self, pool: SharedPool) -> None:
        answered = [self._ask(pool, *one) for one in combinations()]
        assert answered.count(True) > 30
        assert answered.count(False) > 200

    @staticmethod
    def _ask(pool: SharedPool, fields: dict[str, Any], tokens: list[Any]) -> bool:
        """Whether the engines sampled something; else the error was of the promised kind."""
        try:
            prompts = [Prompt(0, [10, 11]), Prompt(1, tokens)]
            spec = SamplingSpec(**({"group_size": 1, "max_new_tokens": 3} | fields))
        except (TypeError, ValueError):
            return False
        try:
            samples = pool.generate(prompts, spec, iteration=0)
        except RequestError:
            return False
        except ValueError:
            if 0 < spec.temperature < 0.01 or spec.temperature > 2:  # vLLM's limits
                return False
            raise
        assert [sample.prompt.index for sample in samples] == [0, 1]
        assert all(0 <= token < VOCABULARY for sample in samples for token in sample.token_ids.tolist())
        return True

    def test_what_vllm_itself_refuses_is_an_error_of_that_request_on_that_engine(self, pool: SharedPool) -> None:
        """Requests as they would reach an engine if none of our own checks stood before it."""
        assert pool.engines is not None
        handle = pool.engines.handles[0]
        ids, good = sample_request(Prompt(0, [10, 11]), 0, SamplingSpec(max_new_tokens=4), 0, (1,))
        wrong = [
            (ids, good | {"stop": "x", "detokenize": False}),
            (ids, good | {"temperature": math.nan}),
            (ids, good | {"temperature": "hot"}),
            (ids, good | {"max_tokens": 0}),
            (ids, good | {"stop_token_ids": ["x"]}),
            (ids, good | {"no_such_argument": 1}),
            ([], good),
            ([100_000], good),
            ([-1], good),
            (["x"], good),
            ([5] * 600, good),
        ]
        expected = handle.actor.generate.remote("right", [(ids, good)])
        refs = [handle.actor.generate.remote(f"wrong {number}", [one]) for number, one in enumerate(wrong)]
        for ref in refs:
            with pytest.raises(RequestError, match=r"vLLM engine 0 of 2 .* refused a request while generating"):
                fetch(ref, handle, "generating")
        (beside,) = fetch(expected, handle, "generating")  # under way at the same time
        (again,) = fetch(handle.actor.generate.remote("again", [(ids, good)]), handle, "generating")
        assert beside.token_ids.tolist() == again.token_ids.tolist()
        with pytest.raises(EngineFailure, match="failed while pausing"):  # what is no request's fault is the engine's
            fetch(handle.actor.abort.remote(7), handle, "pausing")

    def test_every_request_to_the_endpoint_gets_its_own_answer(self, pool: SharedPool) -> None:
        """Whatever is in one field; messages and sizes of bodies are in ``tests/episodes/openai``."""
        sampling = SamplingSpec(max_new_tokens=3)
        with (
            OpenAIEndpoint(pool, chat_tokenizer(CHAT_TEMPLATE), max_context_tokens=128, sampling=sampling) as endpoint,
            httpx.Client(
                base_url=endpoint.base_url(),
                headers={"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"},
                timeout=60,
            ) as client,
            ThreadPoolExecutor(20) as threads,  # from 21 connections on httpx closes idle ones, and some that are not
        ):

            def status_of(body: dict[str, Any]) -> int:
                return client.post("chat/completions", content=json.dumps(body).encode()).status_code

            sent = list(bodies())
            found = list(threads.map(status_of, sent))
            assert not [one for one in zip(sent, found, strict=True) if one[1] not in (200, 400)]
            assert {200, 400} == set(found)


def combinations() -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Every field with every wild value, alone and beside what makes engines look at it; and wild prompts."""
    beside: list[dict[str, Any]] = [{}, {"min_new_tokens": 2}, {"temperature": 0.0}, {"top_k": 3, "top_p": 0.9}]
    names = [name for name in SamplingSpec.__dataclass_fields__ if name != "group_size"]
    for name, value, other in itertools.product(names, WILD, beside):
        yield other | {name: value}, [5]
    for tokens in ([], [0], [127], [VOCABULARY], [5, -1], [2**40], [0.5], ["5"], [True], [None], [5] * 600):
        yield {}, tokens


USER = {"role": "user", "content": "1+1="}


def bodies() -> Iterator[dict[str, Any]]:
    """Bodies with something wild in one field each, and in what was called before."""
    wild = [value for value in WILD if not isinstance(value, bytes)]
    fields = ("messages", "model", "max_tokens", "max_completion_tokens", "stop", "n", "stream", "logprobs", "tools",
              "tool_choice", "response_format", "temperature", "stop_token_ids", "seed")  # fmt: skip
    for name, value in itertools.product(fields, wild):
        yield {"messages": [USER], "max_tokens": 2} | {name: value}
    for name, value in itertools.product(("name", "arguments"), [*wild, "[1]", "{", '{"a": {"b": [1, {}]}}']):
        call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"} | {name: value}}
        said = {"role": "assistant", "content": "2", "tool_calls": [call]}
        yield {"messages": [USER, said, {"role": "tool", "content": "4"}], "max_tokens": 2}


def test_requests_of_earlier_iterations_go_first() -> None:
    requests = [sample_request(Prompt(0, [10]), 0, SamplingSpec(), iteration, (1,)) for iteration in (3, -1)]
    assert [arguments["priority"] for _, arguments in requests] == [3, -1]  # validation is iteration -1
