"""Several sources by weight: shares are those asked for, no example is repeated before all were used once."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import chat_tokenizer, tiny_tokenizer

import rlhfkit
from rlhfkit.datamodules import Mixture, SFTDataModule

from ..opened import Write, opened

CHAT = [{"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "y"}]} for i in range(6)]
TEXT = [{"text": f"text {i}"} for i in range(9)]


module = partial(opened, SFTDataModule, tokenizer=chat_tokenizer())


def texts(data: SFTDataModule) -> list[str]:
    return [tiny_tokenizer().decode(data.examples[i].input_ids) for i in range(len(data.examples))]


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=5),
    weights=st.lists(st.integers(1, 20), min_size=5, max_size=5),
    until=st.sampled_from(["all", "first"]),
)
def test_shares_are_the_weights_and_the_epoch_ends_where_it_should(
    sizes: list[int], weights: list[int], until: Any
) -> None:
    weights = weights[: len(sizes)]
    counts = Mixture([(str(i), weight) for i, weight in enumerate(weights)], until=until).counts(sizes)
    length = sum(counts)
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - length * weight / sum(weights)) <= len(sizes)
    used = [count - size for count, size in zip(counts, sizes, strict=True)]
    assert 0 in used
    assert min(used) >= 0 if until == "all" else max(used) <= 0 or min(sizes) == 1


def test_sources_of_different_formats_are_mixed(write_rows: Write) -> None:
    sources = {write_rows(CHAT, "chat.jsonl"): 0.25, write_rows(TEXT, "text.parquet"): 0.75}
    data = module(sources)
    found = Counter(texts(data))
    assert sum(count for text, count in found.items() if text.startswith("text")) == 18  # each twice
    assert sum(count for text, count in found.items() if ";" in text) == 6  # each once
    assert set(found.values()) == {1, 2}
    assert len(found) == 15
    assert data.examples.lengths == [len(data.examples[i].input_ids) for i in range(24)]
    assert data.examples.targets == [data.examples[i].targets for i in range(24)]
    turns = module({write_rows(CHAT): 1, write_rows(CHAT[:3], "b.jsonl"): 1}).examples.places
    assert [source for source, _ in turns] == [0, 1] * 6


def test_no_example_is_repeated_until_the_first_source_is_used_up(
    write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    sources = {write_rows(CHAT, "chat.jsonl"): 3, write_rows(TEXT, "text.jsonl"): 2}
    data = module(Mixture(sources, until="first"))
    found = Counter(texts(data))
    assert set(found.values()) == {1}
    assert sum(text.startswith("text") for text in found) == 4
    assert "5 of 9 examples are left out of the mixture" in caplog.text
    assert texts(data) == texts(module(Mixture(sources, until="first")))
    others = {tuple(sorted(texts(module(Mixture(sources, until="first"), seed=seed)))) for seed in range(8)}
    assert len(others) > 1  # which four, the seed decides


def test_bad_mixtures_are_refused() -> None:
    for weights, message in (({}, "at least one source"), ({"a.jsonl": 0.0}, "weight of a.jsonl .* above 0, got 0.0")):
        with pytest.raises(ValueError, match=message):
            Mixture(weights)


@pytest.mark.parametrize("name", [name for name in rlhfkit.__all__ if name.endswith("DataModule")])
def test_the_command_line_can_make_every_datamodule(name: str) -> None:
    """It passes all arguments of the base classes with their defaults."""
    from jsonargparse import ArgumentParser

    kind = getattr(rlhfkit, name)
    parser = ArgumentParser()
    parser.add_class_arguments(kind, "data", fail_untyped=False)
    arguments = ["--data.data=a.jsonl"]
    assert parser.instantiate(parser.parse_args(arguments)).data.data == "a.jsonl"
    arguments[0] = '--data.data={"a.jsonl": 3, "b.jsonl": 1}'
    mixture = parser.instantiate(parser.parse_args(arguments)).data.data
    assert mixture.sources == ["a.jsonl", "b.jsonl"]
    assert mixture.weights == [0.75, 0.25]
    streamed = ["--data.streaming=true"] + ["--data.steps_per_epoch=2"] * (name != "PromptDataModule")
    assert parser.instantiate(parser.parse_args(arguments + streamed)).data.streaming
