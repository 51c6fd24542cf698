"""Engines around engines: the inner engine's members are passed on, and every pair of them works."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.vllm.test_pool import load_trainer_model
from shared_pool import SharedPool
from tiny_models import tiny_model, tiny_tokenizer

from episodes.episode_cases import CHAT_TEMPLATE, Counting, Recorded, prompts_of
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.episodes import AgentEngine, EpisodeEngine
from rlhfkit.episodes.openai.agents import AgentConnection
from rlhfkit.rollout import LocalEngine, ModuleWeights, ReplayEngine, RolloutEngine, SamplingSpec, VLLMPool
from rlhfkit.rollout.replay import samples_file, save_samples

SPEC = SamplingSpec(group_size=2, max_new_tokens=5)


async def agent(connection: AgentConnection, prompt: Prompt) -> float:
    """Asks once; the reward is how much was said."""
    async with connection.client(max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=connection.model, messages=[{"role": "user", "content": prompt.text}]
        )
    return float(len(answer.choices[0].message.content))


WRAPPERS: dict[str, Callable[[RolloutEngine], RolloutEngine]] = {
    "episodes": lambda engine: EpisodeEngine(engine, Counting),
    "agents": lambda engine: AgentEngine(engine, agent),
    "wrapper": Recorded,
    "episodes on a wrapper": lambda engine: EpisodeEngine(Recorded(engine), Counting),
}
CAPABILITIES = sorted(name for name, member in vars(RolloutEngine).items() if isinstance(member, property))
# A wrapper without ``stream`` is asked for whole batches.
HANDED_ON = [name for name in CAPABILITIES if name not in ("can_stream", "continuous_batching", "shortens_answers")]


def capabilities(engine: RolloutEngine) -> dict[str, Any]:
    """Everything that an engine says of itself, but what is the outer engine's to say."""
    return {name: getattr(engine, name) for name in HANDED_ON}


class Plain(RolloutEngine):
    """Can do nothing, and says nothing of itself."""

    def start(self, model: str, *, dtype: Any, trust_remote_code: bool = False, load_weights: bool = False) -> None:
        self.arguments = (model, dtype, trust_remote_code, load_weights)

    def generate(self, prompts: Any, sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        return []

    def score(self, sequences: Any) -> list[list[float]]:
        return []

    def load(self, weights: Any, version: int) -> None:
        self.version = version


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", HANDED_ON)
def test_every_capability_of_the_protocol_is_handed_on(wrapper: str, name: str) -> None:
    """Also one that is added to the protocol later and forgotten in the wrapper."""
    plain = Plain()
    special = type("Special", (Plain,), {name: 100 if name == "max_model_len" else not getattr(plain, name)})()
    assert capabilities(special) != capabilities(plain)
    assert capabilities(WRAPPERS[wrapper](special)) == capabilities(special)
    assert capabilities(WRAPPERS[wrapper](plain)) == capabilities(plain)


def test_an_engine_that_forgets_a_method_cannot_be_made() -> None:
    class Half(RolloutEngine):
        def generate(self, prompts: Any, sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
            return []

    with pytest.raises(TypeError, match=r"abstract methods.* load, score, start"):
        Half()  # type: ignore[abstract]
    assert set(CAPABILITIES) >= {"shared", "colocate", "updates_in_flight", "can_stream", "can_score", "recorded"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_engines_of_this_library_are_seen_through_every_wrapper(wrapper: str, tmp_path: Path) -> None:
    engines: list[RolloutEngine] = [
        LocalEngine(), ReplayEngine(tmp_path), VLLMPool(2), VLLMPool(colocate=True), VLLMPool(max_model_len=77),
    ]  # fmt: skip
    for engine in engines:
        wrapped = WRAPPERS[wrapper](engine)
        assert isinstance(wrapped, RolloutEngine)
        assert capabilities(wrapped) == capabilities(engine)
        assert wrapped.can_stream == (wrapper != "wrapper" and not engine.recorded)
        assert wrapped.continuous_batching == (wrapped.can_stream and engine.continuous_batching)
        assert hasattr(type(wrapped), "stream") or not wrapped.can_stream
        assert wrapped.shortens_answers == (wrapper != "wrapper")
        wrapped.version = 5
        assert engine.version == 5
    assert EpisodeEngine(VLLMPool(max_model_len=77), Counting, max_episode_tokens=50).max_model_len == 50
    assert EpisodeEngine(VLLMPool(max_model_len=77), Counting, max_episode_tokens=90).max_model_len == 77
    seen = {tuple(capabilities(engine).values()) for engine in engines}
    assert len(seen) == len(engines)


@pytest.mark.parametrize("method", ["start", "generate", "score", "load", "sync_metrics", "sleep", "wake", "close"])
def test_engines_take_the_arguments_of_the_protocol(method: str) -> None:
    expected = inspect.signature(getattr(RolloutEngine, method))
    for kind in (LocalEngine, VLLMPool, ReplayEngine, EpisodeEngine, AgentEngine):
        assert inspect.signature(getattr(kind, method)) == expected, kind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the shared engines, with a chat template besides."""
    folder = tiny_model(tmp_path_factory.mktemp("wrapped"))
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(wrapper: str, engine: RolloutEngine, model: Path, load_weights: bool) -> list[Sample]:
    """Samples of two prompts."""
    wrapped = WRAPPERS[wrapper](engine)
    wrapped.start(str(model), dtype=torch.float32, load_weights=load_weights)
    try:
        return wrapped.generate(prompts_of(["1+1=", "abc"]), SPEC, iteration=3)
    finally:
        wrapped.close()


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Sample]]]:
    """What each wrapper makes with an engine in this process, and a folder with the dump of each."""
    folder = tmp_path_factory.mktemp("dumps")
    made = {}
    for wrapper in WRAPPERS:
        made[wrapper] = run(wrapper, LocalEngine(), model, load_weights=True)
        save_samples(samples_file(folder / wrapper, 3), made[wrapper])
    return folder, made


def of(samples: list[Sample]) -> list[tuple[Any, ...]]:
    """What samples are made of."""
    return [
        (one.prompt.index, one.sample_index, one.prompt.token_ids, one.token_ids, one.action_mask, one.token_rewards)
        for one in samples
    ]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_recorded_episodes_are_given_by_a_replay_inside_the_same_wrapper(
    wrapper: str, recorded: Any, model: Path
) -> None:
    folder, made = recorded
    replay = ReplayEngine(folder / wrapper)
    assert of(run(wrapper, replay, model, load_weights=True)) == of(made[wrapper])
    assert replay.version == 0
    assert of(run(wrapper, ReplayEngine(folder / wrapper), model, load_weights=False)) == of(made[wrapper])


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_make_as_many_samples_with_vllm(
    wrapper: str, recorded: Any, model: Path, vllm_pool: SharedPool, vllm_model: Path
) -> None:
    vllm_pool.load(ModuleWeights(load_trainer_model(vllm_model)), 0)
    samples = run(wrapper, vllm_pool, model, load_weights=False)
    assert [one[:3] for one in of(samples)] == [one[:3] for one in of(recorded[1][wrapper])]
    assert [sum(one.action_mask or ()) > 0 for one in samples] == [wrapper != "wrapper"] * 4
