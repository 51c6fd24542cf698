"""``VLLMServer`` on a real ``vllm serve``: samples, weights, log-probs, images.

Covers ``stream.py``, ``weights.py`` and ``wire.py`` too.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models.vision_families import prompts, save_vision_model
from rl_runs import digits, fit_run
from shared_pool import SharedPool
from tiny_models import local_engine, tiny_tokenizer, token_logprobs
from vllm_serve import vllm_serve

from rlhfkit import Prompt, RolloutCallback, Sample, SamplingSpec, VLLMServer
from rlhfkit.modules.parts import Correction
from rlhfkit.rollout.errors import RequestError, WeightsNeededError
from rlhfkit.rollout.weight_sync.source import ModuleWeights
from rollout.vllm.test_images import check_three_syncs, sent_as_they_are
from rollout.vllm.test_pool import EXACT, load_trainer_model, train_a_little, worst_difference

pytestmark = [pytest.mark.vllm]

PROMPTS = [Prompt(index, [5 + index, 6, 7, 8]) for index in range(4)]
SPEC = SamplingSpec(group_size=4, max_new_tokens=24)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(vllm_server: str, vllm_model: Path) -> Iterator[VLLMServer]:
    """An engine that has sent its weights to the server."""
    engine = VLLMServer(f"{vllm_server}/v1/", sync_timeout=60, start_timeout=600)
    engine.start(str(vllm_model), dtype=torch.float32)
    engine.load(ModuleWeights(load_trainer_model(vllm_model)), 0)
    yield engine
    engine.close()


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def test_logprobs_equal_the_trainers_after_each_of_three_updates(server: VLLMServer, vllm_model: Path) -> None:
    model = load_trainer_model(vllm_model)
    for version in (1, 2, 3):
        train_a_little(model, seed=version)
        server.load(ModuleWeights(model), version)
        samples = server.generate(PROMPTS, SPEC, iteration=version)
        assert [(sample.prompt.index, sample.sample_index) for sample in samples] == [
            (prompt, index) for prompt in range(4) for index in range(4)
        ]
        assert worst_difference(model, samples) <= EXACT
        assert {token_version for sample in samples for token_version in sample.versions.tolist()} == {version}
    given = [5, 9, 40, 41, 42]
    found = torch.tensor(server.score([given])[0])
    torch.testing.assert_close(found, token_logprobs(model, given), rtol=0, atol=EXACT)


def test_samples_are_those_of_a_pool(server: VLLMServer, vllm_pool: SharedPool, vllm_model: Path) -> None:
    weights = ModuleWeights(load_trainer_model(vllm_model))
    server.load(weights, 4)
    vllm_pool.load(weights, 4)
    of_server, of_pool = (engine.generate(PROMPTS, SPEC, iteration=7) for engine in (server, vllm_pool))
    assert tokens(of_server) == tokens(of_pool)


def test_penalties_of_vllm_are_those_of_a_local_engine(server: VLLMServer, vllm_model: Path) -> None:
    model = load_trainer_model(vllm_model)
    train_a_little(model, seed=9)  # different tokens than the saved model's
    server.load(ModuleWeights(model), 5)
    local = local_engine(vllm_model, model)
    plain = SamplingSpec(group_size=1, max_new_tokens=24, temperature=0.0)
    spec = dataclasses.replace(
        plain, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=0.7, min_new_tokens=20
    )
    found, expected = (engine.generate(PROMPTS, spec, iteration=0) for engine in (server, local))
    assert tokens(found) == tokens(expected) != tokens(local.generate(PROMPTS, plain, iteration=0))
    # Log-probs are the policy's, before penalties, in both.
    assert max(worst_difference(model, samples) for samples in (found, expected)) <= EXACT


def test_completions_have_the_form_that_was_asked_for_and_unknown_logprobs(
    server: VLLMServer, vllm_pool: SharedPool, vllm_model: Path
) -> None:
    weights = ModuleWeights(load_trainer_model(vllm_model))
    server.load(weights, 6)
    vllm_pool.load(weights, 6)
    tokenizer = tiny_tokenizer()
    spec = dataclasses.replace(SPEC, max_new_tokens=40)
    for engine in (server, vllm_pool):
        matching = engine.generate(PROMPTS[:1], dataclasses.replace(spec, regex="[ab]{3}-c"), iteration=0)
        texts = [tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True) for sample in matching]
        assert all(re.fullmatch("[ab]{3}-c", text) for text in texts), texts
        assert all(math.isnan(value) for sample in matching for value in sample.logprobs.tolist())
        objects = engine.generate(PROMPTS[:1], dataclasses.replace(spec, json_schema=SCHEMA), iteration=0)
        ended = [sample for sample in objects if sample.finish_reason == "stop"]
        parsed = [json.loads(tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)) for sample in ended]
        assert parsed
        assert all(value in ({"a": 1}, {"a": 2}) for value in parsed)
        assert not engine.configure_logprobs(dataclasses.replace(spec, regex="a"))


def test_it_is_found_out_which_logprobs_the_server_reports(server: VLLMServer) -> None:
    """It was started with vLLM's default, before temperature and truncation."""
    for changed, known in (({"top_p": 0.9}, True), ({"temperature": 0.5}, False)):
        assert server.configure_logprobs(dataclasses.replace(SPEC, **changed)) is known


def test_a_server_that_lost_the_weights_is_sent_them_again(server: VLLMServer, vllm_model: Path) -> None:
    weights = ModuleWeights(load_trainer_model(vllm_model))
    server.load(weights, 8)
    others = VLLMServer(server.options.urls, sync_timeout=60)
    others.start(str(vllm_model), dtype=torch.float32)
    others.load(weights, 1)
    others.close()
    with pytest.raises(WeightsNeededError, match="serves the weights '1', not version 8 of this run"):
        server.generate(PROMPTS, SPEC, iteration=0)
    server.load(weights, 8)
    assert len(server.generate(PROMPTS, SPEC, iteration=0)) == 16


def test_a_source_that_breaks_off_leaves_a_server_that_the_next_sync_brings_back(
    server: VLLMServer, vllm_model: Path
) -> None:
    model = load_trainer_model(vllm_model)

    class Broken(ModuleWeights):
        def in_checkpoint_format(self) -> "Broken":
            return self

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from itertools.islice(super().__iter__(), 5)
            raise RuntimeError("broken off")

    with pytest.raises(RuntimeError, match="broken off"):
        server.load(Broken(model), 9)
    assert server.version is None
    with pytest.raises(RuntimeError, match="no complete weights"):
        server.generate(PROMPTS, SPEC, iteration=0)
    server.load(ModuleWeights(model), 10)
    assert worst_difference(model, server.generate(PROMPTS, SPEC, iteration=0)) <= EXACT


def test_a_request_that_vllm_refuses_says_so_and_leaves_the_engine_as_it_was(server: VLLMServer) -> None:
    with pytest.raises(RequestError, match="the request was refused"):
        server.generate(PROMPTS[:1], dataclasses.replace(SPEC, regex="[ab"), iteration=0)
    assert len(server.generate(PROMPTS[:1], SPEC, iteration=0)) == 4


def test_a_policy_learns_with_it(vllm_server: str, vllm_model: Path, tmp_path: Path) -> None:
    engine = VLLMServer(vllm_server, start_timeout=600)
    rollouts = RolloutCallback(digits, engine=engine, sampling=SamplingSpec(group_size=4, max_new_tokens=4))
    (tmp_path / "model").symlink_to(vllm_model)
    trainer, *_ = fit_run(
        tmp_path, rollouts=rollouts, max_epochs=2, module_arguments={"parts": [Correction("tis").plain()]}
    )
    assert trainer.callback_metrics["rollout_corr/logprob_abs_diff_mean"] <= EXACT


def test_images_are_seen_after_each_of_three_syncs_and_not_written_again_by_the_server(tmp_path: Path) -> None:
    """On a server that was started with ``--enable-scale-out``."""
    folder = save_vision_model("idefics3", tmp_path / "model")
    with vllm_serve(folder, tmp_path / "log", "--enable-scale-out") as url:
        engine = VLLMServer(url, sync_timeout=60, start_timeout=600)
        engine.start(str(folder), dtype=torch.float32)
        check_three_syncs(engine, folder)
        with sent_as_they_are(), pytest.raises(RequestError, match=r"vLLM has read \d+ tokens of a prompt with images"):
            engine.generate(prompts(folder, several=False)[:1], SPEC, iteration=0)
        engine.close()
