"""Prompts of several sources: shares, equal use and names."""

import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit import Mixture, PromptDataModule
from rlhfkit.datamodules.prompts.rows import source_names
from rlhfkit.datamodules.prompts.table import PromptBatches

from ..opened import opened
from .drawing import advance


def rows(count: int, digit: int) -> list[dict[str, str]]:
    return [{"prompt": f"{digit}{index}=", "answer": str(index)} for index in range(count)]


module = partial(opened, PromptDataModule, answer="answer", rollout_batch_size=6)


def write(path: Path, count: int, digit: int) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count, digit)))
    return str(path)


@settings(max_examples=30)
@given(
    sizes=st.tuples(st.integers(8, 20), st.integers(8, 20), st.integers(8, 20)),
    weights=st.tuples(st.floats(0.5, 4), st.floats(0.5, 4), st.floats(0.5, 4)),
    until=st.sampled_from(["all", "first"]),
)
def test_iterations_have_the_shares_and_a_source_uses_its_prompts_equally(
    sizes: tuple[int, ...], weights: tuple[float, ...], until: Any
) -> None:
    pairs = [(rows(size, digit), weight) for digit, (size, weight) in enumerate(zip(sizes, weights, strict=True))]
    data = module(Mixture(pairs, until=until))
    counts = data._prompts.counts  # type: ignore[union-attr]
    uses: Counter[int] = Counter()
    per_source = [0, 0, 0]
    for iteration in range(1, 12):
        prompts = data.prompt_queue().take(6)
        advance(data, 6)
        assert len({prompt.index for prompt in prompts}) == 6
        uses.update(prompt.index for prompt in prompts)
        for prompt in prompts:
            per_source[int(prompt.text[0])] += 1
        for taken, count in zip(per_source, counts, strict=True):
            # Passes have whole numbers of each, spread evenly; a row may be put off by one iteration.
            assert abs(taken - 6 * iteration * count / sum(counts)) < 3
    each = iter(uses[index] for index in range(sum(sizes)))
    for size in sizes:
        of_source = [*itertools.islice(each, size)]
        assert max(of_source) - min(of_source) <= 2  # one for passes over it, one for a row put off


def test_shares_are_of_the_prompts_that_are_left() -> None:
    """The engine's limit is known after the data was opened, and may drop prompts."""
    long = [{"prompt": "long" * 9, "answer": "1"}] * 6
    sources = [(rows(4, 1) + long, 1.0), (rows(4, 2), 1.0)]
    data = module(Mixture(sources), rollout_batch_size=8, overlong_prompts="drop")
    data.prompt_queue().take(8)
    data.check_prompts(longest=9, reason="the engine's limit")
    for _ in range(3):  # each pass has every prompt once
        found = sorted(prompt.text for prompt in data.prompt_queue().take(8))
        assert found == [f"{digit}{index}=" for digit in (1, 2) for index in range(4)]
        advance(data, 8)


def test_a_prompt_knows_its_source_and_its_index_is_its_own(tmp_path: Path) -> None:
    sources = {write(tmp_path / "easy.jsonl", 4, 1): 1.0, write(tmp_path / "hard.jsonl", 5, 2): 1.0}
    data = module(sources, rollout_batch_size=4, validation_data=sources, validation_split="train")
    held = itertools.chain.from_iterable(PromptBatches(data._validation, 4, 0, 1))
    assert [prompt.metadata["source"] for prompt in held] == ["easy"] * 4 + ["hard"] * 5  # each once
    prompts = {prompt.index: prompt for _ in range(5) for prompt in (data.prompt_queue().take(4), advance(data, 4))[0]}
    assert sorted(prompts) == list(range(9))
    assert [prompts[index].text for index in (0, 3, 4, 8)] == ["10=", "13=", "20=", "24="]
    assert [prompts[index].metadata["source"] for index in (3, 4)] == ["easy", "hard"]


def test_a_resumed_mixture_goes_on_and_other_weights_begin_a_new_pass(caplog: pytest.LogCaptureFixture) -> None:
    def source(weight: float) -> PromptDataModule:
        return module(Mixture([(rows(9, 1), weight), (rows(7, 2), 1.0)]))

    straight, resumed = source(2.0), source(2.0)
    advance(straight, 6)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.prompt_queue().take(6) == straight.prompt_queue().take(6)
    assert "are not those" not in caplog.text
    source(1.0).load_state_dict(straight.state_dict())
    assert "are not those that the checkpoint was saved with" in caplog.text


def test_a_share_that_a_source_cannot_give_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows1 has 2 prompts, and its weight asks for 3\.0 of the 6 of an iteration"):
        module(Mixture([(rows(9, 1), 1.0), (rows(2, 2), 1.0)]))


def test_names_are_short_where_they_differ() -> None:
    assert source_names(["data/gsm8k.jsonl", "openai/math", [{}]]) == ["gsm8k", "math", "rows2"]
    assert source_names(["a/train.jsonl", "b/train.jsonl"]) == ["a/train.jsonl", "b/train.jsonl"]
