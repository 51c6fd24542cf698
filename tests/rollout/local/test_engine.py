"""LocalEngine against Transformers, and the properties every engine promises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import local_engine, prompts_of, tiny_model, tiny_tokenizer

from rlhfkit.data import Prompt
from rlhfkit.models import load_causal_lm
from rlhfkit.rollout import LocalEngine, ModuleWeights, SamplingSpec
from rlhfkit.rollout.engine import sample_seed
from rlhfkit.rollout.local.generator import truncate

TEXTS = ["1+2=", "hello world", "a", "12345 67"]


@pytest.fixture(scope="module")
def engine(folder: Path, models: list[torch.nn.Module]) -> LocalEngine:
    return local_engine(folder, models[0], version=7)


def test_a_sample_does_not_depend_on_its_neighbours(engine: LocalEngine, folder: Path) -> None:
    spec = SamplingSpec(group_size=4, max_new_tokens=40)
    together = engine.generate(prompts_of(TEXTS), spec, iteration=3)
    by_three = local_engine(folder, max_sequences=3).generate(prompts_of(TEXTS), spec, iteration=3)
    backwards = engine.generate(prompts_of(TEXTS)[::-1], spec, iteration=3)
    assert [(s.prompt.index, s.sample_index) for s in together] == [(p, s) for p in range(4) for s in range(4)]
    assert [sample.token_ids.tolist() for sample in together] == [sample.token_ids.tolist() for sample in by_three]
    later = engine.generate(prompts_of(TEXTS), spec, iteration=4)
    assert [sample.token_ids.tolist() for sample in together] != [sample.token_ids.tolist() for sample in later]
    groups = [backwards[first : first + 4] for first in range(0, 16, 4)][::-1]
    assert [s.token_ids.tolist() for s in together] == [s.token_ids.tolist() for group in groups for s in group]


def test_tokens_come_with_their_probability(folder: Path, models: list[torch.nn.Module]) -> None:
    """First tokens of 4,000 samples against the model's own distribution (chi-square, 99.9 %)."""
    engine = local_engine(folder, models[0], max_sequences=4000)
    made = engine.generate(prompts_of(["a"]), SamplingSpec(group_size=4000, max_new_tokens=1), iteration=0)
    counts = torch.bincount(torch.tensor([sample.token_ids.tolist()[0] for sample in made]), minlength=128)
    with torch.no_grad():
        ids = torch.tensor([prompts_of(["a"])[0].token_ids.tolist()])
        expected = models[0](input_ids=ids).logits[0, -1].softmax(-1) * 4000
    often = expected >= 5
    merged = torch.cat([counts[often].float(), counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    degrees = len(wanted) - 1
    limit = degrees + 3.1 * (2 * degrees) ** 0.5 + 5  # about the 99.9 % quantile of chi-square
    assert float(((merged - wanted).square() / wanted).sum()) < limit


@pytest.mark.parametrize("least", [0, 20])
def test_stop_token_ends_a_sample_and_belongs_to_it(engine: LocalEngine, least: int) -> None:
    spec = SamplingSpec(group_size=16, max_new_tokens=60, min_new_tokens=least)
    eos, reasons = tiny_tokenizer().eos_token_id, set()
    for sample in engine.generate(prompts_of(TEXTS), spec, iteration=0):
        *before, last = sample.token_ids.tolist()
        assert eos not in before
        assert sample.finish_reason == ("stop" if last == eos else "length")
        assert last == eos or sample.num_tokens == 60
        assert sample.num_tokens >= least
        reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_text_ends_a_sample(engine: LocalEngine) -> None:
    spec = SamplingSpec(group_size=16, max_new_tokens=40, stop=("a", "e"))
    tokenizer = tiny_tokenizer()
    for sample in engine.generate(prompts_of(["1+2="]), spec, iteration=0):
        text = tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        assert not set(text[:-1]) & {"a", "e"}
        assert (sample.finish_reason == "stop") == (text[-1:] in ("a", "e") or sample.token_ids.tolist()[-1] == 1)


def test_a_prompt_that_does_not_fit_is_named(engine: LocalEngine) -> None:
    with pytest.raises(ValueError, match=r"prompt 3 has 600 tokens .* context is 512"):
        engine.generate([Prompt(3, [5] * 600)], SamplingSpec(group_size=1, max_new_tokens=4), iteration=0)
    with pytest.raises(ValueError, match="prompt 0 has no tokens"):
        engine.generate([Prompt(0, [])], SamplingSpec(group_size=1, max_new_tokens=4), iteration=0)


def test_a_closed_engine_starts_again_with_another_model(folder: Path, tmp_path: Path) -> None:
    engine = local_engine(folder)
    engine.close()
    other = tiny_model(tmp_path / "other", seed=3, tied=False)
    engine.start(str(other), dtype=torch.float32)
    engine.load(ModuleWeights(load_causal_lm(str(other))), version=1)
    assert engine.generate(prompts_of(TEXTS), SamplingSpec(group_size=1, max_new_tokens=2), iteration=0)


PROBABILITIES = torch.tensor([[0.05, 0.4, 0.15, 0.3, 0.1]])


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.01}, [1]),
        ({"min_p": 0.3}, [1, 2, 3]),
        ({"min_p": 0.3, "top_k": 2}, [1, 3]),
    ],
    ids=str,
)
def test_truncation_keeps_what_its_rule_says_and_a_spec_knows_that_it_does(arguments: Any, tokens: list[int]) -> None:
    kept = truncate(PROBABILITIES.log(), SamplingSpec(**arguments))[0]
    assert kept.isfinite().nonzero()[:, 0].tolist() == tokens
    assert SamplingSpec(**arguments, temperature=0.5).truncates is bool(arguments)
    assert not SamplingSpec(**arguments, group_size=1, temperature=0.0).truncates
    assert SamplingSpec(min_new_tokens=2).truncates


def test_seeds_tell_samples_apart() -> None:
    seeds = {sample_seed(*key) for key in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
