"""Group functions: seeds, masks, lengths and scores of what they make, by any engine and on any ranks."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from episodes.episode_cases import Recorded, check_logprobs
from rl_runs import RANK, RANKS, Iterations, PlainGRPO, digits, fit_run, on_all_ranks, setup_run, weights
from strategies import ranks
from tiny_models import local_engine, tiny_model, tiny_tokenizer
from waiting import LIMIT

from rlhfkit import (
    Ahead,
    DynamicSampling,
    Invariants,
    OnlineDPOModule,
    Oversampling,
    ReplayEngine,
    RolloutCallback,
    RolloutDump,
)
from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout import GroupSampler, SamplingSpec, request_batcher, sample_groups
from rlhfkit.rollout.groups import GroupError

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)
TEXTS = ("1+1=", "abc", "x")


def prompts() -> list[Prompt]:
    return [Prompt(10 + place, tiny_tokenizer()(text)["input_ids"], text) for place, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("groups"), context=64))


@pytest.fixture(scope="module")
def engine(folder: str) -> Recorded:
    return Recorded(local_engine(folder))


def run(engine: Any, group: Any, folder: str, sampling: SamplingSpec = SAMPLING) -> list[Sample]:
    return sample_groups(engine, group, prompts(), sampling, model=folder, iteration=3)


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


# ------------------------------------------------------------------ functions of this file, as users write them


async def default(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    return await sampler.sample(prompt, size)


async def ask_again(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    """Prompts whose answers have no digit are asked again, with a hint."""
    for attempt, hint in enumerate(["", "3", "45"]):
        group = await sampler.sample(prompt, size, attempt=attempt, hint=hint)
        if any(await sampler.score(group)):
            break
    return group


async def tree(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    """Half of the samples are other ends of the first ones."""
    stems = await sampler.sample(prompt, size // 2)
    cut = [sampler.cut(stem, stem.num_tokens // 2) for stem in stems]
    tails = await asyncio.gather(*(sampler.continue_(stem, 1) for stem in cut))
    return [*stems, *(sample for each in tails for sample in each)]


async def shortest(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    """The two shortest of the answers that are right, or else all."""
    group = await sampler.sample(prompt, size)
    await sampler.score(group)
    right = [sample for sample in group if sample.reward]
    return sorted(right, key=lambda sample: sample.num_tokens)[:2] or group


async def all_together(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    """One of each kind."""
    made = [*await ask_again(prompt, 2, sampler), *await tree(prompt, 2, sampler)]
    return [*made, *(await shortest(prompt, 4, sampler)), *(await sampler.sample(prompt, 1, attempt=9))]


# ------------------------------------------------------------------ samples


def test_a_function_that_only_samples_gives_what_the_engine_gives(engine: Recorded, folder: str) -> None:
    expected = engine.generate(prompts(), SAMPLING, iteration=3)
    samples = run(engine, default, folder)
    assert tokens(samples) == tokens(expected)
    assert [sample.logprobs.tolist() for sample in samples] == [sample.logprobs.tolist() for sample in expected]
    assert [(one.prompt.index, one.sample_index, one.prompt.text) for one in samples] == [
        (10 + place, index, TEXTS[place]) for place in range(3) for index in range(4)
    ]
    assert samples[0].text == tiny_tokenizer().decode(samples[0].token_ids.tolist(), skip_special_tokens=True)


def test_what_all_functions_wait_for_is_one_call_also_if_their_caller_is_interrupted_between_prompts(
    engine: Recorded, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.run_coroutine_threadsafe

    def slowly(work: Any, loop: Any) -> Any:
        try:
            return start(work, loop)
        finally:
            time.sleep(0.05)

    async def three_times(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        for _ in range(3):
            for _ in range(prompt.index - 10):  # they are not ready at the same moment
                await asyncio.sleep(0)
            group = await sampler.sample(prompt, size)
        return group

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", slowly)
    monkeypatch.setattr(request_batcher, "MAX_WAIT", LIMIT)
    engine.calls.clear()
    run(engine, three_times, folder)
    assert engine.calls == [3, 3, 3]


def test_every_request_has_seeds_of_its_own_and_no_company_changes_them(engine: Recorded, folder: str) -> None:
    async def several(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        requests = (sampler.sample(prompt, 1, attempt=attempt) for attempt in (0, 0, 1, 1, 2))
        return [sample for group in await asyncio.gather(*requests) for sample in group]

    samples = run(engine, several, folder)
    assert len(set(map(tuple, tokens(samples)))) == 15
    for place in range(3):
        alone = sample_groups(engine, several, prompts()[place : place + 1], SAMPLING, model=folder, iteration=3)
        assert tokens(alone) == tokens(samples[5 * place : 5 * place + 5])


def test_a_hint_is_not_trained_on_and_a_given_text_ends_and_has_no_policy(engine: Recorded, folder: str) -> None:
    async def hinted(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        return [*await sampler.sample(prompt, size - 1, attempt=1, hint="?!"), sampler.given(prompt, "42")]

    hint, samples = tiny_tokenizer().encode("?!", add_special_tokens=False), run(engine, hinted, folder)
    for sample in samples:
        if sample not in samples[3::4]:
            plain = prompts()[sample.prompt.index - 10]
            assert sample.prompt.token_ids.tolist() == [*plain.token_ids.tolist(), *hint]
            check_logprobs(engine, sample)
    for sample in samples[3::4]:
        assert sample.text == "42"
        assert sample.token_ids.tolist()[-1] == tiny_tokenizer().eos_token_id
        assert all(map(math.isnan, sample.logprobs.tolist()))
        assert set(sample.versions.tolist()) == {-1}
        assert (sample.sample_index, sample.finish_reason) == (3, "stop")


@pytest.mark.parametrize("trained", [False, True])
def test_a_continuation_begins_with_what_it_continues_and_has_the_length_that_is_left(
    engine: Recorded, folder: str, trained: bool
) -> None:
    async def continued(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        (first,) = await sampler.sample(prompt, 1)
        stem = sampler.cut(first, 3)
        return [stem, *await sampler.continue_(stem, size, trained=trained)]

    samples = run(engine, continued, folder)
    for stem, *others in (samples[place : place + 5] for place in range(0, 15, 5)):
        assert (stem.num_tokens, stem.finish_reason) == (3, "length")
        assert len(set(map(tuple, tokens(others)))) > 1
        for sample in others:
            assert sample.token_ids.tolist()[:3] == stem.token_ids.tolist()
            assert sample.action_mask.tolist() == [trained] * 3 + [True] * (sample.num_tokens - 3)
            assert sample.num_tokens <= 8
            assert sample.num_tokens == 8 or sample.finish_reason == "stop"
            check_logprobs(engine, sample)


def test_a_conversation_reads_what_was_appended_and_learns_what_the_policy_said(engine: Recorded, folder: str) -> None:
    async def conversation(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        first = [sampler.cut(sample, 2) for sample in await sampler.sample(prompt, size)]
        asked = [sampler.append(sample, f"<{sample.text}>") for sample in first]
        answers = await asyncio.gather(*(sampler.continue_(sample, 1, trained=True) for sample in asked))
        return [sample for answer in answers for sample in answer]

    for sample in run(engine, conversation, folder, dataclasses.replace(SAMPLING, max_new_tokens=16)):
        said = tiny_tokenizer().decode(sample.token_ids.tolist()[:2], skip_special_tokens=True)
        assert sample.text[len(said) :].startswith(f"<{said}>")
        assert sample.action_mask is not None
        assert sample.action_mask.tolist().index(True, 2) - sample.action_mask.tolist().index(False) == len(said) + 2
        check_logprobs(engine, sample)


def plain(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
    return []


def test_what_makes_no_group_is_an_error_that_says_why(engine: Recorded, folder: str) -> None:
    async def returned(value: Any) -> Any:
        return value

    async def full(prompt: Prompt, sampler: GroupSampler) -> Any:
        return await sampler.continue_((await sampler.sample(prompt, 1, hint="x"))[0], 1)

    async def unscored(prompt: Prompt, sampler: GroupSampler) -> Any:
        return await sampler.score(await sampler.sample(prompt, 1))

    with pytest.raises(TypeError, match="write `async def plain"):
        run(engine, plain, folder)
    ends_late = dataclasses.replace(SAMPLING, min_new_tokens=8)
    for made, kind, message in (
        (lambda prompt, sampler: returned([]), GroupError, "no sample for prompt 10: return at least one"),
        (lambda prompt, sampler: returned("42"), GroupError, "returned str for prompt 10"),
        (
            lambda prompt, sampler: sampler.sample(dataclasses.replace(prompt, index=99), 2),
            GroupError,
            "for prompt 10 returned samples of prompt 99",
        ),
        (full, ValueError, "leaves no room to continue it"),
        (lambda prompt, sampler: sampler.sample(prompt, 1, hint="x" * 64), ValueError, "the context is 64"),
        (unscored, RuntimeError, r"needs RolloutCallback\(reward="),
    ):

        async def function(prompt: Prompt, size: int, sampler: GroupSampler) -> Any:
            return await made(prompt, sampler)  # noqa: B023

        with pytest.raises(kind, match=message):
            run(engine, function, folder, ends_late)


# ------------------------------------------------------------------ in training


@pytest.mark.parametrize(
    "more", [{}, {"parts": [DynamicSampling()]}, {"parts": [Oversampling(0.5)]}, {"parts": [Ahead(1)]}]
)
def test_everything_that_functions_do_trains_with_every_kind_of_rollout(tmp_path: Path, more: Any) -> None:
    checks = Invariants()
    rollouts = RolloutCallback(digits, sampling=SAMPLING, group=all_together, **more)
    trainer, *_ = fit_run(tmp_path, rollouts=rollouts, callbacks=[checks])
    assert checks.checked == 2
    assert trainer.global_step == 4
    if not more:  # engine and trainer agree about all that is trained on
        assert float(trainer.callback_metrics["rollout_corr/logprob_abs_diff_max"]) < 1e-3
    assert not rollouts.groups._scored  # type: ignore[union-attr]


@pytest.mark.parametrize(("size", "capped"), [(1, True), (3, False), (7, True)])
def test_an_iteration_of_groups_of_any_size_trains_every_sample_once(tmp_path: Path, size: int, capped: bool) -> None:
    scored: list[int] = []

    def counted(samples: Sequence[Sample]) -> list[float]:
        scored.extend(map(id, samples))
        return digits(samples)

    async def uneven(prompt: Prompt, count: int, sampler: GroupSampler) -> list[Sample]:
        made = await sampler.sample(prompt, 4 if prompt.index % 3 else size)
        await sampler.score(made)
        return made[1:] if prompt.index % 3 == 1 else made  # a part of a group may be judged otherwise

    trained: list[tuple[int, int]] = []

    class Rows(Invariants):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            used = batch.action_mask.any(-1)
            trained.extend(zip(batch.group[used].tolist(), batch.sample_index[used].tolist(), strict=True))

    rollouts = RolloutCallback(counted, sampling=SAMPLING, group=uneven)
    sizes = {"max_tokens_per_micro_batch": 64, "updates_per_iteration": 2, "micro_batch_size": None} if capped else {}
    trainer, *_ = fit_run(
        tmp_path,
        rollouts=rollouts,
        callbacks=[Rows()],
        data_arguments=sizes or {"micro_batch_size": 2},
        accumulate_grad_batches=1 if capped else 8,
        max_epochs=1,
    )
    made = [(sample.prompt.index, sample.sample_index) for sample in rollouts.samples]
    assert sorted(trained) == sorted(made)
    drawn = {index for index, _ in made}
    assert len(made) == sum((size, 3, 4)[index % 3] for index in drawn)
    # What was scored as it is, is not scored again.
    assert len(scored) == len(made) + sum(4 for index in drawn if index % 3 == 1)
    assert trainer.global_step == 2


def test_a_loss_of_pairs_refuses_a_group_of_one(tmp_path: Path) -> None:
    async def single(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        return await sampler.sample(prompt, 1 if prompt.index % 2 else size)

    rollouts = RolloutCallback(digits, sampling=SamplingSpec(group_size=2, max_new_tokens=8), group=single)
    trainer, module, data, _ = setup_run(tmp_path, module=OnlineDPOModule, rollouts=rollouts, max_epochs=1)
    with pytest.raises(
        ValueError, match=r"returned 1 sample\(s\) for prompt \d+, of which OnlineDPOModule cannot learn"
    ):
        trainer.fit(module, data)


def test_a_recorded_run_is_replayed_without_its_function(tmp_path: Path) -> None:
    dump = RolloutDump(tmp_path / "dump")
    recorded = RolloutCallback(digits, sampling=SAMPLING, group=ask_again)
    _, module, _ = fit_run(tmp_path, rollouts=recorded, callbacks=[dump], max_epochs=1)
    replayed = RolloutCallback(digits, engine=ReplayEngine(tmp_path / "dump"), sampling=SAMPLING, group=ask_again)
    _, again, _ = fit_run(tmp_path, rollouts=replayed, max_epochs=1)
    assert tokens(replayed.samples) == tokens(recorded.samples)
    assert all(torch.equal(weights(module)[name], tensor) for name, tensor in weights(again).items())


def on_ranks(folder: Path) -> dict[str, Any]:
    """Entry point of a rank: what is sampled, and the weights after two iterations."""
    seen = Iterations()
    fit_run(
        folder / f"rank{RANK}",
        module=PlainGRPO,
        module_arguments={"lr": 0.05},
        data_arguments={"micro_batch_size": 8 // RANKS},
        rollouts=RolloutCallback(digits, sampling=SAMPLING, group=all_together),
        callbacks=[seen],
        **on_all_ranks(),
    )
    return {"tokens": seen.tokens, "weights": seen.weights}


@pytest.mark.distributed
def test_two_ranks_make_the_samples_of_one_and_learn_the_same(tmp_path: Path) -> None:
    alone = on_ranks(tmp_path / "one")
    both = ranks.run("rollout.test_groups:on_ranks", 2, tmp_path / "two")[0]
    assert both["tokens"] == alone["tokens"]
    assert both["weights"] == pytest.approx(alone["weights"], rel=1e-5)
