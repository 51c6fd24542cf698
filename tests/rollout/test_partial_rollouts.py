"""Samples that were cut and continued: nothing of them changes, and what follows is the new weights' own.

Ranks that share them are in ``test_collector.py``, vLLM's engines in ``vllm/test_pool.py``, whole runs in
``tests/callbacks/rollout/test_oversampling.py``.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import completion_logprobs, prompts_of

from rlhfkit import LocalEngine, Oversampling, Prompt, RolloutCallback, Sample, SamplingSpec
from rlhfkit.rollout import ModuleWeights
from rlhfkit.rollout.local.engine import LocalStream
from rlhfkit.rollout.partial_rollouts import Dropped, dropped_from

TEXTS = ["1+2=", "hello world", "a"]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    """Small batches, so that some groups wait when others are cut."""
    made = LocalEngine(max_sequences=5)
    made.start(str(folder), dtype=torch.float32)
    yield made
    made.close()


def steps(stream: LocalStream, count: int) -> list[list[Sample]]:
    """The groups that end within so many tokens."""
    return [group for _ in range(count) for group in stream.collect(9, wait=0.0)]


def rest(stream: LocalStream) -> list[list[Sample]]:
    found = []
    while groups := stream.collect(9):
        found += groups
    return found


def keyed(groups: list[list[Sample]]) -> dict[tuple[int, int], Sample]:
    return {(sample.prompt.index, sample.sample_index): sample for group in groups for sample in group}


SPECS = [
    SamplingSpec(group_size=3, max_new_tokens=24, stop_token_ids=tuple(range(60, 70))),
    SamplingSpec(group_size=3, max_new_tokens=16, min_new_tokens=6, stop_token_ids=tuple(range(30, 90))),
    SamplingSpec(group_size=2, max_new_tokens=16, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.5),
    SamplingSpec(group_size=3, max_new_tokens=24, temperature=0.8, top_p=0.9, stop=("e", "5")),
]


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=st.sampled_from(SPECS), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_samples_that_are_cut_anywhere_and_continued_are_those_that_are_not(
    engine: LocalEngine, models: list[torch.nn.Module], spec: SamplingSpec, cuts: list[int]
) -> None:
    engine.load(ModuleWeights(models[0]), version=0)
    whole = keyed([engine.generate(prompts_of(TEXTS), spec, iteration=3)])
    found: list[list[Sample]] = []
    begun: list[list[Sample]] = []
    for count in (*cuts, None):  # at last to the end
        stream = engine.stream(spec, iteration=3)
        known = {group[0].prompt.index for group in [*found, *begun]}
        stream.resume(begun)
        stream.submit([prompt for prompt in prompts_of(TEXTS) if prompt.index not in known])
        found += rest(stream) if count is None else steps(stream, count)
        begun = stream.cut()
        assert stream.collect(9) == []
        assert all(sample.num_tokens for group in begun for sample in group)
    again = keyed(found)
    assert again.keys() == whole.keys()
    for key, sample in again.items():
        assert (sample.token_ids.tolist(), sample.finish_reason) == (
            whole[key].token_ids.tolist(),
            whole[key].finish_reason,
        )
        torch.testing.assert_close(
            torch.tensor(sample.logprobs), torch.tensor(whole[key].logprobs), rtol=0, atol=2e-5
        )  # a prefix is computed in one pass


@torch.no_grad()
def test_prefixes_keep_their_versions_and_what_follows_has_the_log_probs_of_the_new_weights(
    engine: LocalEngine, models: list[torch.nn.Module]
) -> None:
    spec = SamplingSpec(group_size=3, max_new_tokens=24)
    engine.load(ModuleWeights(models[0]), version=4)
    stream = engine.stream(spec, iteration=0)
    stream.submit(prompts_of(TEXTS))
    steps(stream, 9)
    begun = stream.cut()
    engine.load(ModuleWeights(models[1]), version=5)
    stream = engine.stream(spec, iteration=1)
    stream.resume(begun)
    before = {key: sample.num_tokens for key, sample in keyed(begun).items()}
    continued = 0
    for key, sample in keyed(rest(stream)).items():
        count = before.get(key, 0)
        continued += 0 < count < sample.num_tokens
        assert sample.versions.tolist() == [4] * count + [5] * (sample.num_tokens - count)
        own = completion_logprobs(models[1], sample)[count:]
        torch.testing.assert_close(torch.tensor(sample.logprobs)[count:], own, rtol=0, atol=1e-5)
    assert continued >= 3


def test_what_another_sampling_has_no_place_for_is_sampled_anew(
    engine: LocalEngine, models: list[torch.nn.Module]
) -> None:
    engine.load(ModuleWeights(models[0]), version=0)
    prompt = prompts_of(TEXTS)[0]
    begun = [Sample(prompt, index, [7] * 4, [-1.0] * 4, [0] * 4, "abort") for index in range(4)]
    stream = engine.stream(SamplingSpec(group_size=2, max_new_tokens=4), iteration=0)
    stream.resume([begun])
    (group,) = rest(stream)
    assert [sample.sample_index for sample in group] == [0, 1]
    assert all(sample.token_ids.tolist() != [7] * 4 for sample in group)


def group(index: int, tokens: int) -> list[Sample]:
    return [Sample(Prompt(index, [6]), 0, [3] * tokens, [-0.25] * tokens, [1] * tokens, "abort", reward=1.0)]


def test_a_run_that_is_resumed_continues_what_it_would_have_continued_on_any_number_of_ranks() -> None:
    states = []
    for rank in range(3):
        part = Oversampling(0.5, continued=True)
        assert part.partials is not None
        for iteration in range(1, 5):  # each continues what the one before has dropped
            own = [group(10 * iteration + rank, tokens=1 + iteration)]
            part.partials[iteration] = Dropped.of({10 * iteration + each: each for each in range(3)}, own)
        part.end_iteration(2)
        assert sorted(part.partials) == [2, 3, 4]
        file = io.BytesIO()
        torch.save(part.state_dict(2), file)  # a resumed run samples iterations 2 and 3 again
        file.seek(0)
        states.append(torch.load(file, weights_only=True))
    wanted = range(20, 25)
    for world_size in (1, 2, 3, 4):
        found: list[int] = []
        for rank in range(world_size):
            shares = [states[0], *(states[saved] for saved in range(rank, 3, world_size))]
            ((iteration, partial),) = dropped_from(
                [one for share in shares for one in share], rank=rank, world_size=world_size
            ).items()
            assert iteration == 2
            for other in ({"token_ids": [8]}, {"token_ids": [6], "attachments": ("other.png",)}):
                assert partial.begun(Prompt(index, **other) for index in wanted) == []
            assert [partial.ranks.get(index) for index in wanted] == [0, 1 % world_size, 2 % world_size, None, None]
            for (sample,) in partial.begun(Prompt(index, [6]) for index in wanted):
                assert sample.prompt.token_ids.tolist() == [6]
                assert (sample.logprobs.tolist(), sample.reward) == ([-0.25] * 3, None)
                found.append(sample.prompt.index)
        assert sorted(found) == [20, 21, 22]


def test_what_was_begun_in_a_run_is_not_continued_in_the_run_of_another_trainer() -> None:
    rollouts = RolloutCallback(len, parts=[Oversampling(0.5, continued=True)])  # type: ignore[arg-type]
    partials, trainers = rollouts.collector.partials, [object(), object()]
    assert partials is not None
    for trainer, known in ((trainers[0], {}), (trainers[0], {1: {7: 0}}), (trainers[1], {})):
        rollouts.setup(trainer, None, "predict")  # type: ignore[arg-type]
        assert {number: each.ranks for number, each in partials.items()} == known
        partials[1] = Dropped.of({7: 0}, [group(7, tokens=2)])
