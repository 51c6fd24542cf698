"""Episodes on a real engine: exact tokens, rewards of turns, limits, failures, independence of concurrency.

Covers ``base.py``, ``episode.py``, ``environment.py``, ``trajectory.py`` and ``rollout/event_loop.py`` too.
"""

import asyncio
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny_models import prompts_of, tiny_tokenizer

from episodes.episode_cases import Counting, Faulty, Recorded, chat_model, check_logprobs, runner_of, turns
from rlhfkit.data.types import Experience, Prompt, Sample
from rlhfkit.episodes import Action, Environment, Episodes, Step
from rlhfkit.rewards import EnvironmentReward
from rlhfkit.rewards.base import score_samples
from rlhfkit.rollout import LocalEngine, SamplingSpec
from rlhfkit.rollout.groups import GroupError, GroupRunner

PROMPTS = ["1+1=", "abc", "x", "what is this"]
SAMPLING = SamplingSpec(group_size=3, max_new_tokens=5, seed=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """One model for all, with a chat template; it never closes."""
    recorded = Recorded(LocalEngine())
    recorded.folder = chat_model(tmp_path_factory.mktemp("episodes"), context=128)  # type: ignore[attr-defined]
    return recorded


@pytest.fixture
def run_episodes(engine: Recorded) -> Iterator[Callable[..., list[Sample]]]:
    """Run episodes from ``PROMPTS`` or others."""
    runners: list[GroupRunner] = []

    def run(
        environment: Any, prompts: list[Prompt] | None = None, sampling: SamplingSpec = SAMPLING, **options: Any
    ) -> list[Sample]:
        runners.append(one := runner_of(engine, Episodes(environment, **options), engine.folder))  # type: ignore[attr-defined]
        engine.seen.clear()
        engine.calls.clear()
        return one.generate(prompts or prompts_of(PROMPTS), sampling, iteration=2)

    yield run
    for one in runners:
        one.loop.close()


class Chatting(Environment):
    """Answers with a message, three times."""

    def reset(self, prompt: Prompt) -> Any:
        return [{"role": "system", "content": "!"}, {"role": "user", "content": prompt.text}]

    def step(self, action: Action) -> Step:
        return Step([{"role": "user", "content": f"no {action.turn}"}], done=action.turn == 2)


class Appending(Counting):
    """Puts something behind the prompt."""

    def reset(self, prompt: Prompt) -> Any:
        super().reset(prompt)
        return ">>"


@pytest.mark.parametrize("environment", [Counting, Chatting, Appending])
def test_what_is_recorded_is_what_the_engine_saw_and_said_at_every_turn_with_its_logprobs(
    run_episodes: Any, engine: Recorded, environment: Any
) -> None:
    samples = run_episodes(environment)
    recorded = [turn for sample in samples for turn in turns(sample)]
    assert len(recorded) == len(samples) * 3
    assert sorted(recorded) == sorted(engine.seen)
    for sample in samples:
        check_logprobs(engine, sample)
        assert set(sample.versions.tolist()) == {0}


def test_a_conversation_reads_as_its_template_writes_it(run_episodes: Any) -> None:
    one = SamplingSpec(group_size=1, max_new_tokens=4)
    (sample,) = run_episodes(Chatting, prompts_of(["2+2"]), one, chat_template_kwargs={"style": "~"})
    text = tiny_tokenizer().decode(sample.all_token_ids.tolist())
    first, second, third = (tiny_tokenizer().decode(said).removesuffix("<eos>") for _, said in turns(sample))
    assert text.removesuffix("<eos>") == (
        f"[s]~!<eos>\n[u]~2+2<eos>\n[a]{first}<eos>\n[u]~no 0<eos>\n[a]{second}<eos>\n[u]~no 1<eos>\n[a]{third}"
    )


def test_rewards_lie_where_they_were_earned_and_add_up(run_episodes: Any) -> None:
    samples = run_episodes(Counting)
    score_samples(EnvironmentReward(), samples)
    for sample in samples:
        assert sample.token_rewards is not None
        ends = [len(read) + len(said) - len(sample.prompt.token_ids) - 1 for read, said in turns(sample)]
        assert [sample.token_rewards.tolist()[end] for end in ends] == [1.0, 2.0, 4.0]
        assert sum(sample.token_rewards.tolist()) == sample.reward == sample.info["reward"] == 7.0
        assert sample.reward_parts == {"episode": 7.0}
        assert sample.info["steps"] == [{"turn": 0}, {"turn": 1}, {"turn": 2}]
        said = tiny_tokenizer().decode(turns(sample)[-1][1], skip_special_tokens=True)
        assert sample.info["last_text"] == said  # what LastTurnReward reads
        assert (sample.info["turns"], sample.info["ended"], sample.info["failed"]) == (3, "done", False)
    experience = Experience.from_samples(samples)
    assert experience.token_rewards is not None
    assert torch.equal(experience.token_rewards.sum(-1), experience.rewards)
    assert int(experience.action_mask.sum()) == sum(len(said) for sample in samples for _, said in turns(sample))


def comparable(samples: list[Sample]) -> list[Any]:
    return [
        (sample.prompt.index, sample.sample_index, sample.token_ids.tolist(), sample.action_mask.tolist())
        for sample in samples
    ]


class Crowd(Counting):
    """Counts its episodes: how many there are, and the most that there were."""

    here, most = 0, 0

    async def reset(self, prompt: Prompt) -> None:  # type: ignore[override]
        super().reset(prompt)
        Crowd.here += 1
        Crowd.most = max(Crowd.most, Crowd.here)

    async def close(self) -> None:  # type: ignore[override]
        Crowd.here -= 1


def test_episodes_do_not_depend_on_what_else_is_played(run_episodes: Any, engine: Recorded) -> None:
    whole = run_episodes(Counting)
    assert [(index, place) for index, place, *_ in comparable(whole)] == [(i, g) for i in range(4) for g in range(3)]
    for concurrency in (1, 5):
        Crowd.most = 0
        assert comparable(run_episodes(Crowd, concurrency=concurrency)) == comparable(whole)
        assert Crowd.most == concurrency
    assert comparable(run_episodes(Counting, parallel_calls=4)) == comparable(whole)
    assert max(engine.calls) < 12  # all that waits is divided among four
    prompts = prompts_of(PROMPTS)  # two ranks, the second of which has them in another order
    shares = run_episodes(Counting, prompts[::2]) + run_episodes(Counting, prompts[3::-2])
    assert sorted(comparable(shares)) == comparable(whole)
    assert len({tuple(tokens) for *_, tokens, _ in comparable(whole)}) == 12  # neither groups nor turns repeat
    other = run_episodes(Counting, sampling=SamplingSpec(group_size=3, max_new_tokens=5, seed=2))
    assert comparable(other) != comparable(whole)


@pytest.mark.parametrize(
    ("options", "ended", "turn_count"),
    [
        ({"max_turns": 2}, "turns", 2),
        ({"max_episode_tokens": 15}, "tokens", 2),
        ({"max_episode_tokens": 13}, "tokens", 2),  # the last turn gets what room is left
        ({}, "done", 3),
    ],
)
def test_limits_cut_off_and_keep_what_was_earned(run_episodes: Any, options: Any, ended: str, turn_count: int) -> None:
    samples = run_episodes(Counting, prompts_of(["abc"]), **options)
    score_samples(EnvironmentReward(), samples)
    for sample in samples:
        assert (sample.info["ended"], sample.info["turns"]) == (ended, turn_count)
        assert sample.reward == [1.0, 3.0, 7.0][turn_count - 1]
        assert len(sample.prompt.token_ids) + len(sample.token_ids) <= options.get("max_episode_tokens", 128)
        assert sample.action_mask.tolist()[-1]  # type: ignore[index]  # nothing that nobody answered
        if ended != "done":
            assert sample.finish_reason == "length"
    score_samples(EnvironmentReward(truncated="mask"), samples)
    if ended != "done":
        assert {sample.reward for sample in samples} == {None}


FAULTS = ["raises", "hangs", "returns nothing", "says nothing", "not finite", "no judgement", None]


def test_an_environment_that_fails_loses_its_own_episode_only(
    run_episodes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"{number}" for number in range(len(FAULTS))]
    good = run_episodes(Counting, prompts_of(texts, FAULTS))
    closed = Faulty.closed
    samples = run_episodes(Faulty, prompts_of(texts, FAULTS), environment_timeout=4.0)
    assert Faulty.closed - closed == len(samples) == 21
    score_samples(EnvironmentReward(), samples)
    for sample, right in zip(samples, good, strict=True):
        fault = sample.prompt.answer
        if fault is None:
            assert sample.token_ids.tolist() == right.token_ids.tolist()
            assert sample.reward == 7.0
            continue
        assert sample.reward is None
        assert sample.token_ids.tolist() == right.token_ids.tolist()[: len(sample.token_ids)]
        if fault == "no judgement":
            assert (sample.info["ended"], sample.info["failed"]) == ("done", False)
            continue
        assert sample.info["ended"] == ("time" if fault == "hangs" else "error")
        assert sample.finish_reason == "abort"
    (message,) = [record.getMessage() for record in caplog.records if "episodes failed" in record.getMessage()]
    assert "15 of 21 episodes failed" in message
    assert "sample 0 of prompt 0, after 2 turns: ArithmeticError: no such number" in message
    assert "step() of the environment took longer than 4 s" in samples[3].info["error"]
    experience = Experience.from_samples(samples)
    trained = experience.action_mask.any(-1)
    assert trained.tolist() == [sample.reward is not None for sample in samples]


def test_an_environment_that_always_fails_is_an_error(run_episodes: Any) -> None:
    with pytest.raises(GroupError, match=r"all 6 episodes failed, the first: sample 0 of prompt 0.*ArithmeticError"):
        run_episodes(Faulty, prompts_of(["1", "2"], ["raises", "raises"]))
    with pytest.raises(GroupError, match="prompt 1, after 2 turns: ArithmeticError: no such number"):
        run_episodes(Faulty, prompts_of(["1", "2"], [None, "raises"]), on_error="raise")


def test_an_episode_that_takes_too_long_is_not_judged(run_episodes: Any) -> None:
    class Slow(Counting):
        async def step(self, action: Action) -> Step:
            await (asyncio.sleep(0) if self.prompt.index else asyncio.Event().wait())
            return await super().step(action)

    samples = run_episodes(Slow, prompts_of(["1", "2"]), episode_timeout=5.0)
    assert [sample.info["ended"] for sample in samples] == ["time"] * 3 + ["done"] * 3
    assert "the episode (limit: 5 s) took longer" in samples[0].info["error"]
    score_samples(EnvironmentReward(), samples)
    assert [sample.reward for sample in samples] == [None] * 3 + [7.0] * 3


def test_an_async_environment_that_blocks_everything_is_named(engine: Recorded, run_episodes: Any) -> None:
    class Blocking(Counting):
        async def step(self, action: Action) -> Step:
            time.sleep(6)
            return await super().step(action)

    group = Episodes(Blocking)
    one = runner_of(engine, group, engine.folder)  # type: ignore[attr-defined]
    group.blocked_after = 2.0
    with pytest.raises(RuntimeError, match=r"has blocked the event loop of all groups(.|\n)*time\.sleep\(6\)"):
        one.generate(prompts_of(["1"]), SAMPLING, iteration=0)
    group.environment = Counting
    assert len(one.generate(prompts_of(["1"]), SAMPLING, iteration=0)) == 3


def test_groups_are_given_as_they_are_finished_and_waited_for_as_long_as_told(
    run_episodes: Any, engine: Recorded
) -> None:
    prompts, go_on = prompts_of(PROMPTS), threading.Event()

    class Held(Counting):
        async def step(self, action: Action) -> Step:
            while self.prompt.index == 0 and not go_on.is_set():
                await asyncio.sleep(0.01)
            return await super().step(action)

    expected = comparable(run_episodes(Counting, prompts))  # of iteration 2
    one = runner_of(engine, Episodes(Held), engine.folder)  # type: ignore[attr-defined]
    streams = [one.stream(SAMPLING, iteration=iteration) for iteration in (0, 2)]
    streams[0].submit(prompts[:2], iteration=2)
    streams[1].submit(prompts[2:])
    groups = streams[0].collect(5)
    assert [group[0].prompt.index for group in groups] == [1]
    assert streams[0].collect(4, wait=0.1) == []  # a wait for the episodes would not end
    go_on.set()
    groups += streams[0].collect(1)
    groups += [group for _ in range(2) for group in streams[1].collect(1)]
    assert sorted(comparable([sample for group in groups for sample in group])) == expected
    for stream in streams:
        assert stream.collect(1, wait=60.0) == []  # nothing is left to wait for
        stream.submit([Prompt(9, [5])])
        stream.close()
        assert stream.collect(1) == []
    one.loop.close()


def test_it_can_be_sent_to_another_process_and_started_again(engine: Recorded) -> None:
    folder = engine.folder  # type: ignore[attr-defined]
    used = runner_of(LocalEngine(), Episodes(Counting, max_turns=3, concurrency=2), folder)
    assert len(used.generate(prompts_of(["1"]), SAMPLING, iteration=0)) == 3
    used.close()
    group = pickle.loads(pickle.dumps(used)).function
    for _ in range(2):
        one = runner_of(LocalEngine(), group, folder)
        assert len(one.generate(prompts_of(["1"]), SAMPLING, iteration=0)) == 3
        one.close()
        one.close()


def test_a_configuration_file_names_environments_and_tools() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_class_arguments(Episodes, "group")
    for rest in ({"environment": f"{Counting.__module__}.Counting"}, {"tools": ["json.dumps"]}):
        parsed = parser.parse_object({"group": {"max_turns": 3, **rest}})
        made = parser.instantiate(parsed).group
        assert isinstance(made.environment(), Environment)


def test_wrong_arguments_are_named(engine: Recorded, run_episodes: Any) -> None:
    with pytest.raises(RuntimeError, match=r"before RolloutCallback\.setup"):
        GroupRunner(LocalEngine(), Episodes(Counting)).generate(prompts_of(["1"]), SAMPLING, iteration=0)
    with pytest.raises(ValueError, match="prompt 0 has 128 tokens"):
        run_episodes(Counting, prompts_of(["x" * 128]))
