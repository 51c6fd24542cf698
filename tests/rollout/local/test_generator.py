"""LocalEngine while it generates: weights that change between two tokens, groups that are taken before the others end.

Covers ``caching.py`` and ``lock.py`` too.
"""

import threading
import time
from pathlib import Path

import pytest
import torch
from tiny_models import completion_logprobs, local_engine, prompts_of
from waiting import LIMIT

from rlhfkit.data import Prompt, Sample
from rlhfkit.models.attention.families import takes_finished_masks
from rlhfkit.rollout import LocalEngine, ModuleWeights, SamplingSpec
from rlhfkit.rollout.local.weights import WeightLock

TEXTS = ["1+2=", "hello world", "a", "12345 67"]
SPEC = SamplingSpec(group_size=3, max_new_tokens=24)


class SwappedInside(LocalEngine):
    """Loads the next policy in another thread before its 9th and 17th token of a completion."""

    models: list[torch.nn.Module]
    tokens = 0

    def decode(self, *arguments: object) -> object:  # type: ignore[override]
        decoding = super().decode(*arguments)  # type: ignore[arg-type]
        weights = decoding._weights

        def swapping() -> object:
            if self.tokens in (8, 16):
                version = self.tokens // 8
                other = threading.Thread(target=self.load, args=(ModuleWeights(self.models[version]), version))
                other.start()
                other.join(LIMIT)
            self.tokens += 1
            return weights()

        decoding._weights = swapping  # type: ignore[assignment]
        return decoding


def swapped(folder: Path, models: list[torch.nn.Module]) -> list[Sample]:
    """Samples of three policies, one after the other."""
    engine = SwappedInside()
    engine.models = models
    engine.start(str(folder), dtype=torch.float32)
    engine.load(ModuleWeights(models[0]), version=0)
    return engine.generate(prompts_of(TEXTS), SPEC, iteration=0)


@torch.no_grad()
def test_every_token_has_the_log_prob_of_its_own_version(folder: Path, models: list[torch.nn.Module]) -> None:
    samples = swapped(folder, models)
    assert any(set(sample.versions.tolist()) == {0, 1, 2} for sample in samples)
    for sample in samples:
        assert sample.versions.tolist() == ([0] * 8 + [1] * 8 + [2] * 8)[: len(sample.token_ids)]
        everyones = [completion_logprobs(model, sample) for model in models]
        own = torch.stack([everyones[version][place] for place, version in enumerate(sample.versions.tolist())])
        torch.testing.assert_close(torch.tensor(sample.logprobs), own, rtol=0, atol=2e-5)
    # The policies are far apart: the log-probs of another version would not have passed.
    assert float((everyones[0] - everyones[1]).abs().mean()) > 0.1


def test_weights_that_are_the_same_change_nothing(folder: Path, models: list[torch.nn.Module]) -> None:
    plain = local_engine(folder, models[0]).generate(prompts_of(TEXTS), SPEC, iteration=0)
    found = swapped(folder, [models[0]] * 3)
    assert [sample.token_ids.tolist() for sample in found] == [sample.token_ids.tolist() for sample in plain]


def test_a_load_that_fails_ends_what_is_being_generated(folder: Path, models: list[torch.nn.Module]) -> None:
    engine = local_engine(folder, models[0])
    stream = engine.stream(SamplingSpec(group_size=2, max_new_tokens=400, min_new_tokens=400), iteration=0)
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            while True:  # so that nothing is finished before the load
                stream.submit(prompts_of(TEXTS))
                stream.collect(4)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=generate, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match="did not send"):
        engine.load(list(ModuleWeights(models[1]))[:3], version=1)
    thread.join(LIMIT)
    assert "no weights yet" in str(failures[0])


@pytest.mark.parametrize("max_sequences", [128, 5])
def test_a_stream_gives_every_group_once_and_the_shortest_first(
    folder: Path, models: list[torch.nn.Module], max_sequences: int
) -> None:
    engine = local_engine(folder, models[0], max_sequences=max_sequences)
    assert engine.can_stream
    spec = SamplingSpec(group_size=3, max_new_tokens=60)
    expected = engine.generate(prompts_of(TEXTS), spec, iteration=0)
    stream = engine.stream(spec, iteration=0)
    stream.submit(prompts_of(TEXTS)[:3])
    groups = stream.collect(1)
    stream.submit(prompts_of(TEXTS)[3:])
    while given := stream.collect(2):
        assert len(given) <= 2
        groups += given
    assert sorted(group[0].prompt.index for group in groups) == [0, 1, 2, 3]
    by_index = sorted(groups, key=lambda group: group[0].prompt.index)
    assert [(s.sample_index, s.token_ids.tolist()) for group in by_index for s in group] == [
        (s.sample_index, s.token_ids.tolist()) for s in expected
    ]
    if max_sequences == 128:  # side by side, so whatever is complete first comes first
        longest = [max(len(sample.token_ids) for sample in group) for group in groups[:3]]
        assert longest == sorted(longest)
    assert stream.collect(1) == []
    stream.submit(prompts_of(TEXTS))
    assert len(stream.collect(1)) == 1
    for _ in range(2):  # the rest is dropped
        stream.close()
    assert stream.collect(4) == []


def test_a_change_goes_first_and_never_meets_a_step() -> None:
    lock, inside, stop = WeightLock(timeout=LIMIT), threading.Event(), threading.Event()
    changing: list[int] = []
    met: list[int] = []

    def steps() -> None:
        while not stop.is_set():
            with lock.read():
                inside.set()
                time.sleep(0.001)
                met.extend(changing)

    threads = [threading.Thread(target=steps) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(LIMIT)
    for _ in range(5):
        with lock.write():  # two threads that step all the time cannot keep it waiting
            changing.append(1)
            time.sleep(0.002)
            changing.clear()
    stop.set()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert not met


def test_a_step_that_never_ends_is_named() -> None:
    lock = WeightLock(timeout=0.05)
    with lock.read(), pytest.raises(TimeoutError, match=r"one token took longer than 0\.05 s"), lock.write():
        pass
    with lock.write(), pytest.raises(TimeoutError, match=r"new weights took longer than 0\.05 s"), lock.read():
        pass
    with lock.read():  # whoever gave up does not block the others
        pass


@pytest.mark.parametrize("lengths", [[5, 5, 5], [3, 9, 5]])
def test_finished_masks_change_no_bit(
    folder: Path, models: list[torch.nn.Module], lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would make the same ones, after a look at each mask that a GPU's host would wait for."""
    engine = local_engine(folder, models[0])
    texts = [Prompt(index, list(range(5, 5 + length))) for index, length in enumerate(lengths)]
    assert engine._finished_masks
    found = []
    for finished in (True, False):
        monkeypatch.setattr(engine, "_finished_masks", finished)
        samples = engine.generate(texts, SamplingSpec(group_size=3, max_new_tokens=20), iteration=0)
        found.append([(sample.token_ids.tolist(), sample.logprobs.tolist()) for sample in samples])
    assert found[0] == found[1]


def test_layers_that_do_not_see_all_tokens_take_no_finished_masks() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    windows = Gemma2ForCausalLM(Gemma2Config(vocab_size=64, head_dim=16, num_key_value_heads=2, **shape))
    assert not takes_finished_masks(windows)
