"""``VLLMPool`` on real engines: samples, weights, and what happens when something breaks.

Covers ``actor.py``, ``arguments.py`` and ``in_process.py`` too.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_pool import SharedPool, until_sampling
from strategies import ranks
from tiny_models import completion_logprobs, tiny_model, tiny_tokenizer, token_logprobs
from torch import Tensor, nn

from rlhfkit.data.types import Prompt, Sample
from rlhfkit.rollout.engine import SamplingSpec
from rlhfkit.rollout.local.generator import truncate
from rlhfkit.rollout.supervision.scheduler import split_into_jobs
from rlhfkit.rollout.vllm.pool import VLLMPool
from rlhfkit.rollout.weight_sync.source import ModuleWeights

EXACT = 1e-5  # float32 on both sides; what is left is the order of summation

vllm = pytest.mark.vllm


def load_trainer_model(folder: Path) -> nn.Module:
    """The Hugging Face model that plays the trainer's policy."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def train_a_little(model: nn.Module, seed: int) -> None:
    """Change every weight by something an engine that kept an old one would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def trainer_logits(model: nn.Module, sample: Sample) -> Tensor:
    """(T, V) logits that the completion's tokens were drawn from, computed in one pass without a cache."""
    ids = torch.tensor([sample.all_token_ids.tolist()])
    return model(ids).logits[0, sample.prompt.num_tokens - 1 : -1]


def worst_difference(model: nn.Module, samples: list[Sample]) -> float:
    """Largest difference between the engine's and the trainer's log-probs of sampled tokens."""
    with torch.no_grad():
        found = [completion_logprobs(model, sample) - torch.tensor(sample.logprobs) for sample in samples]
    return float(torch.cat(found).abs().max())


def score_difference(model: nn.Module, pool: VLLMPool, tokens: list[int]) -> float:
    """Largest difference between ``pool.score`` and the trainer's log-probs."""
    return float((token_logprobs(model, tokens) - torch.tensor(pool.score([tokens])[0])).abs().max())


def keyed(samples: list[Sample]) -> dict[tuple[int, int], Sample]:
    """Samples by what they are."""
    return {(sample.prompt.index, sample.sample_index): sample for sample in samples}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    """Eight prompts of 10 to 80 tokens; the longer ones fill two blocks of the prefix cache."""
    tokenizer = tiny_tokenizer()
    texts = [f"{number} + {number * 7} = " + "abc " * (2 * number) for number in range(2, 10)]
    return [Prompt(index=index, token_ids=tokenizer(text).input_ids) for index, text in enumerate(texts)]


@pytest.fixture
def pool(vllm_pool: SharedPool, vllm_model: Path) -> SharedPool:
    """The shared engines serving the saved weights as version 0."""
    vllm_pool.load(ModuleWeights(load_trainer_model(vllm_model)), 0)
    return vllm_pool


SPEC = SamplingSpec(group_size=4, max_new_tokens=24)


@vllm
class TestWeights:
    """What the engines serve is what the trainer has."""

    def test_logprobs_equal_the_trainers_after_each_of_three_updates(
        self, vllm_pool: SharedPool, vllm_model: Path, prompts: list[Prompt]
    ) -> None:
        model = load_trainer_model(vllm_model)
        for version in (1, 2, 3):
            train_a_little(model, seed=version)
            vllm_pool.load(ModuleWeights(model), version)
            assert vllm_pool.version == version
            vllm_pool.load_metrics()  # which begin anew
            # The same prompts each time: cached keys and values of old weights would show.
            samples = vllm_pool.generate(prompts, SPEC, iteration=version)
            assert worst_difference(model, samples) <= EXACT
            assert {token_version for sample in samples for token_version in sample.versions.tolist()} == {version}
            assert score_difference(model, vllm_pool, prompts[-1].token_ids.tolist()) <= EXACT
            load = vllm_pool.load_metrics()
            assert 0 < load.pop("engine/running") <= len(prompts) * SPEC.group_size
            assert 0 < load.pop("engine/kv_cache") <= 1
            assert [*load] == ["engine/waiting"]
        assert vllm_pool.load_metrics() == {}  # nothing since

    def test_samples_that_are_cut_are_continued_with_the_new_weights(
        self, pool: SharedPool, vllm_model: Path, prompts: list[Prompt]
    ) -> None:
        spec = SamplingSpec(group_size=4, max_new_tokens=400)
        model, stream = load_trainer_model(vllm_model), pool.stream(spec, iteration=0)
        stream.submit(prompts)
        assert pool.engines is not None
        until_sampling(pool.engines.handles[0])
        begun = stream.cut()
        cut = keyed([sample for group in begun for sample in group])
        unfinished = [sample for sample in cut.values() if sample.finish_reason == "abort"]
        assert unfinished
        assert worst_difference(model, list(cut.values())) <= EXACT
        train_a_little(model, seed=1)
        pool.load(ModuleWeights(model), 1)
        stream = pool.stream(spec, iteration=1)
        stream.resume(begun)
        samples = []
        while groups := stream.collect(8):
            samples += [sample for group in groups for sample in group]
        assert len(samples) == 4 * len(begun)
        for key, sample in keyed(samples).items():
            before = cut[key].num_tokens if key in cut else 0
            assert sample.num_tokens <= 400
            assert sample.versions.tolist() == [0] * before + [1] * (sample.num_tokens - before)
            if before:
                assert (sample.token_ids.tolist()[:before], sample.logprobs.tolist()[:before]) == (
                    cut[key].token_ids.tolist(),
                    cut[key].logprobs.tolist(),
                )
            own = completion_logprobs(model, sample)[before:]
            torch.testing.assert_close(torch.tensor(sample.logprobs.tolist()[before:]), own, rtol=0, atol=EXACT)
        assert all(handle.num_requests == 0 for handle in pool.engines.handles)

    def test_weights_that_are_not_finite_change_nothing_and_a_transfer_that_breaks_off_is_healed_by_the_next(
        self, pool: SharedPool, vllm_model: Path, prompts: list[Prompt]
    ) -> None:
        model = load_trainer_model(vllm_model)
        diverged = copy.deepcopy(model)
        with torch.no_grad():
            diverged.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = float("nan")
        with pytest.raises(ValueError, match=r"not finite .*layers\.1\.mlp\.down_proj\.weight"):
            pool.load(ModuleWeights(diverged), 1)
        assert pool.version == 0
        assert score_difference(model, pool, prompts[-1].token_ids.tolist()) <= EXACT
        train_a_little(model, seed=5)

        class BreaksOff(ModuleWeights):
            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                for name, tensor in super().__iter__():
                    if name.endswith("layers.0.self_attn.v_proj.weight"):  # q and k of this layer have left
                        raise OSError("the disk is gone")
                    yield name, tensor + 1.0

        start = time.monotonic()
        with pytest.raises(OSError, match="the disk is gone"):
            pool.load(BreaksOff(model), 1)
        assert time.monotonic() - start < pool.sync_timeout / 2  # engines are released, not left to their time limit
        assert pool.version is None
        with pytest.raises(RuntimeError, match="no complete weights"):
            pool.generate(prompts, SPEC, iteration=0)
        pool.load(ModuleWeights(model), 2)
        samples = pool.generate(prompts, SPEC, iteration=0)
        assert worst_difference(model, samples) <= EXACT


@vllm
class TestSamples:
    """What is sampled, and that it depends on nothing but the weights and the seed."""

    def test_every_sample_has_a_seed_of_its_own_whatever_engines_and_order(
        self, pool: SharedPool, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samples = pool.generate(prompts, SPEC, iteration=3)
        assert [(sample.prompt.index, sample.sample_index) for sample in samples] == [
            (prompt.index, index) for prompt in prompts for index in range(SPEC.group_size)
        ]
        first = keyed(samples)
        later = keyed(pool.generate(prompts, SPEC, iteration=1))
        other = keyed(pool.generate(prompts, dataclasses.replace(SPEC, seed=1), iteration=3))
        for changed in (later, other):
            differ = sum(changed[key].token_ids.tolist() != sample.token_ids.tolist() for key, sample in first.items())
            assert differ > len(first) * 3 // 4
        for prompt in prompts:
            assert len({tuple(first[prompt.index, index].token_ids.tolist()) for index in range(4)}) > 1
        backwards = keyed(pool.generate(prompts[::-1], SPEC, iteration=3))
        alone = keyed(pool.generate(prompts[5:6], SPEC, iteration=3))
        assert pool.engines is not None
        monkeypatch.setattr(pool.engines.handles[1], "responsive", False)
        one = keyed(pool.generate(prompts, SPEC, iteration=3))
        assert backwards.keys() == first.keys() == one.keys()
        for others in (backwards, alone, one):
            for key, sample in others.items():
                assert sample.token_ids.tolist() == first[key].token_ids.tolist()
                assert torch.allclose(torch.tensor(sample.logprobs), torch.tensor(first[key].logprobs), atol=EXACT)

    @pytest.mark.parametrize("temperature", [1.0, 0.8])
    def test_tokens_are_truncated_and_their_logprobs_are_those_before(
        self, pool: SharedPool, vllm_model: Path, prompts: list[Prompt], temperature: float
    ) -> None:
        cut: dict[str, Any] = {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "min_new_tokens": 20}
        spec = SamplingSpec(group_size=2, max_new_tokens=40, temperature=temperature, **cut)
        model, samples = load_trainer_model(vllm_model), pool.generate(prompts, spec, iteration=0)
        assert min(sample.num_tokens for sample in samples) >= spec.min_new_tokens
        if temperature == 1.0:
            assert worst_difference(model, samples) <= EXACT
        else:  # vLLM reports log-probs at temperature 1 in this mode, which are no use
            assert all(math.isnan(logprob) for sample in samples for logprob in sample.logprobs.tolist())
        for sample in samples:
            left = truncate(trainer_logits(model, sample), spec)
            assert left.gather(-1, torch.tensor(sample.token_ids.tolist())[:, None]).isfinite().all()

    def test_stops_keep_the_token_that_ended_the_completion(self, pool: SharedPool, prompts: list[Prompt]) -> None:
        tokenizer = tiny_tokenizer()
        plain = pool.generate(prompts, SamplingSpec(group_size=8, max_new_tokens=40), iteration=0)
        for sample in plain:
            ended = sample.token_ids.tolist()[-1] == tokenizer.eos_token_id
            assert sample.finish_reason == ("stop" if ended else "length")
            assert ended or len(sample.token_ids) == 40
            assert tokenizer.eos_token_id not in sample.token_ids.tolist()[:-1]
        assert {sample.finish_reason for sample in plain} == {"stop", "length"}

        letter = next(token for token in plain[0].token_ids.tolist()[8:] if len(tokenizer.decode([token])) == 1)
        spec = SamplingSpec(group_size=8, max_new_tokens=40, stop_token_ids=(letter,))
        by_token = pool.generate(prompts, spec, iteration=0)
        spec = SamplingSpec(group_size=8, max_new_tokens=40, stop=(tokenizer.decode([letter]),))
        by_text = pool.generate(prompts, spec, iteration=0)
        for sample, token, text in zip(plain, by_token, by_text, strict=True):
            ids = sample.token_ids.tolist()
            cut = ids.index(letter) + 1 if letter in ids else len(ids)
            assert token.token_ids.tolist() == ids[:cut] == text.token_ids.tolist()
            assert token.finish_reason == text.finish_reason
        assert any(len(token.token_ids) < len(sample.token_ids) for sample, token in zip(plain, by_token, strict=True))

    def test_more_prompt_tokens_than_fit_into_a_step(self, pool: SharedPool, vllm_model: Path) -> None:
        """An engine on a CPU dies of it when it may divide a prompt (see engine_arguments)."""
        many = [Prompt(index=index, token_ids=[10 + index % 80] * 200 + [20 + index]) for index in range(60)]
        samples = pool.generate(many, SamplingSpec(group_size=1, max_new_tokens=4), iteration=0)
        assert worst_difference(load_trainer_model(vllm_model), samples[-10:]) <= EXACT


@vllm
@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda pool: pool.generate([Prompt(41, [7] * 500)], SPEC, iteration=0), "41 has 500 tokens .* context is 512"),
        (
            lambda pool: pool.generate([Prompt(0, [7])], SamplingSpec(temperature=0.001), iteration=0),
            r"0\.01 to 2\.0, got SamplingSpec\.temperature=0\.001",
        ),
        (lambda pool: pool.generate([Prompt(0, [7])], SamplingSpec(temperature=2.5), iteration=0), "temperature=2.5"),
        (lambda pool: pool.score([[7]]), "2 to 511 tokens .* got one of 1"),
        (lambda pool: pool.score([[7] * 512]), "2 to 511 tokens .* got one of 512"),
    ],
)
def test_what_vllm_would_change_or_not_serve_is_one_clear_error_at_once(pool: SharedPool, ask: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ask(pool)


@vllm
@pytest.mark.distributed
@pytest.mark.slow
def test_two_zero3_ranks_publish_and_notice_every_failure_alike(tmp_path: Path) -> None:
    ranks.run("rollout.vllm.zero3_ranks:serve", 2, tmp_path, model=str(tiny_model(tmp_path / "model")))


class TestWithoutEngines:
    """What needs no vLLM."""

    def test_logprobs_before_truncation_are_arranged_where_vllm_can_report_them(self) -> None:
        pool = VLLMPool()
        specs = [SamplingSpec(), SamplingSpec(top_p=0.9), SamplingSpec(temperature=0.7)]
        assert [pool.configure_logprobs(spec) for spec in specs] == [True, True, True]
        assert not pool.configure_logprobs(SamplingSpec(temperature=0.7, top_p=0.9))
        chosen = VLLMPool(engine_arguments={"logprobs_mode": "processed_logprobs"})
        assert [chosen.configure_logprobs(spec) for spec in specs] == [True, False, True]

    def test_missing_packages_name_the_extras(self, monkeypatch: pytest.MonkeyPatch, vllm_model: Path) -> None:
        monkeypatch.setattr("rlhfkit.rollout.vllm.pool.importlib.util.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"ray and vllm.*rlhfkit\[rollout\].*rlhfkit\[cpu\].*LocalEngine"):
            VLLMPool().start(str(vllm_model), dtype=torch.float32)

    def test_using_it_before_start_says_so(self) -> None:
        with pytest.raises(RuntimeError, match="not running"):
            VLLMPool().generate([], SPEC, iteration=0)

    @pytest.mark.parametrize("engines", [1, 2, 3, 8])
    @pytest.mark.parametrize("prompts", [1, 2, 5])
    @pytest.mark.parametrize("group_size", [1, 3, 8])
    def test_jobs_hold_every_sample_once_and_keep_engines_busy(
        self, engines: int, prompts: int, group_size: int
    ) -> None:
        jobs = split_into_jobs(prompts, group_size, engines)
        samples = [(row, index) for row, indices in jobs for index in indices]
        assert samples == [(row, index) for row in range(prompts) for index in range(group_size)]
        assert len(jobs) >= min(engines, prompts * group_size)
        assert all(len(indices) for _, indices in jobs)
