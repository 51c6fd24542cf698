"""Streams of prompts: none lost or doubled, the same from any cursor, and a run that stops goes on bitwise.

Covers stream.py.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlhfkit import DynamicSampling, PromptDataModule
from rlhfkit.datamodules import Mixture, PreferenceDataModule, SFTDataModule

from ..opened import Write, opened
from .drawing import Watch, advance, watched

ROWS = [{"prompt": f"{i}+1=", "answer": f"#### {i + 1}", "level": i % 3} for i in range(25)]


sizes = {"rollout_batch_size": 4, "shuffle_buffer_size": 10}
module = partial(opened, PromptDataModule, answer="answer", streaming=True, **sizes)


def test_prompts_are_those_of_a_file_that_was_read_as_a_whole(write_rows: Write) -> None:
    path = write_rows(ROWS)
    whole = module(path, streaming=False, shuffle=False)
    assert module(path, shuffle=False).prompt_queue().take(25) == whole.prompt_queue().take(25)
    drawn = module(path).prompt_queue().take(75)
    assert [prompt.index for prompt in drawn] == [*range(75)]  # they go on over passes
    assert [prompt.text for prompt in drawn] != [row["prompt"] for row in ROWS] * 3  # shuffled


@pytest.mark.parametrize("mixed", [False, True])
def test_requeued_prompts_come_first_and_a_resumed_run_draws_what_the_straight_one_does(
    write_rows: Write, tmp_path: Path, mixed: bool
) -> None:
    data: Any = write_rows(ROWS)
    if mixed:
        data = {data: 2, write_rows([row | {"prompt": row["prompt"] + "?"} for row in ROWS[:7]], "b.jsonl"): 1}

    def history(made: PromptDataModule, first: int, count: int) -> list[tuple[list[tuple[int, str]], list[int]]]:
        found = []
        for number in range(first, first + count):
            chance = random.Random(number)
            queue = made.prompt_queue()
            drawn = [*queue.take(chance.randint(1, 9)), *queue.take(chance.randint(1, 9))]
            back = chance.sample(drawn, chance.randint(0, len(drawn) - 1))
            queue.requeue(back)
            drawn += queue.take(1)  # none of them
            found.append(([(one.index, one.text) for one in drawn], [one.index for one in drawn if one in back]))
            made.set_cursor(queue.after)
            torch.save(made.state_dict(), tmp_path / f"{number + 1}.pt")
        return found

    straight = history(module(data), 0, 12)
    waiting, used = list[int](), Counter[int]()
    for drawn, back in straight:
        indices = [index for index, _ in drawn]
        assert indices[: len(waiting)] == waiting[: len(indices)]  # in the order of drawing, none twice
        waiting = [*back, *waiting[len(indices) :]]
        used.update({*indices} - {*back})
    assert set(used.values()) == {1}
    assert {*used, *waiting} == {*range(max(index for drawn, _ in straight for index, _ in drawn) + 1)}
    for stop in range(1, 12):
        resumed = module(data)
        resumed.load_state_dict(torch.load(tmp_path / f"{stop}.pt", weights_only=True))
        assert history(resumed, stop, 12 - stop) == straight[stop:]


def test_little_of_an_endless_source_is_read_ahead_or_kept() -> None:
    read = [0]

    def rows() -> Iterator[dict[str, str]]:
        for number in itertools.count():
            read[0] = number
            yield {"prompt": f"{number}"}

    data = module(rows, answer=None)
    for drawn in range(0, 4000, 50):
        assert len(data.prompt_queue().take(50)) == 50
        advance(data, 50)
        assert read[0] < drawn + 50 + 2 * 10
    assert not data._prompts._kept


def test_rows_that_make_no_prompt_are_named_when_they_are_read(write_rows: Write, caplog: Any) -> None:
    def drawn(rows: list[dict[str, Any]], vocabulary: int = 101, **options: Any) -> list[str]:
        data = module(write_rows([*ROWS[:11], *rows]), shuffle=False, answer=None, **options)
        data.check_prompts(longest=12, reason="the model's context", vocabulary=vocabulary)
        return [prompt.text for prompt in data.prompt_queue().take(12)]

    long = {"prompt": "1" * 20}
    for row, message in (
        ({"prompt": None}, r"column 'prompt' of .*data\.jsonl, row 11, has no value"),
        ({"prompt": ""}, r"column 'prompt' of .*data\.jsonl, row 11, is a prompt without a token"),
        (long, r"data\.jsonl, row 11, has 20 tokens, more than 12 \(the model's context\)"),
    ):
        with pytest.raises(ValueError, match=message):
            drawn([row])
    assert drawn([long, {"prompt": "x"}], overlong_prompts="drop")[-1] == "x"
    with pytest.raises(ValueError, match="no row of the whole data has a prompt that is short enough"):
        drawn([], overlong_prompts="drop", max_prompt_length=1)
    with pytest.raises(ValueError, match=r"data\.jsonl, row 0, has the token \d+ .* knows the tokens 0 to 3"):
        drawn([], vocabulary=4)


def test_what_needs_the_whole_data_is_refused(write_rows: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write_rows(ROWS)
    with pytest.raises(ValueError, match=r"orders all prompts of a pass, which a stream does not know"):
        module(path, curriculum=lambda one: one.rows)
    for other, message in (
        (
            SFTDataModule(path, streaming=True, steps_per_epoch=1),
            "SFTDataModule with streaming=True, and .* leave st",
        ),
        (PreferenceDataModule(path), "PreferenceDataModule, whose examples are more"),
    ):
        with pytest.raises(ValueError, match=f"pretraining_data is a {message}"):
            PromptDataModule(path, pretraining_data=other)
    with pytest.raises(ValueError, match="answer='solution' is not a column"):
        module(path, answer="solution")
    data = module(path)
    with pytest.raises(ValueError, match="the column 'level' is needed for all prompts before training"):
        data.prompt_column("level")
    advance(data, 7)
    anew = module(path, seed=1)
    anew.load_state_dict(data.state_dict())
    assert "the order cannot be continued, so a new pass over them begins" in caplog.text
    drawn = anew.prompt_queue().take(25)
    assert [prompt.index for prompt in drawn] == [*range(7, 32)]
    assert {prompt.text for prompt in drawn} == {row["prompt"] for row in ROWS}


def test_a_run_over_a_stream_goes_on_bitwise_and_ends_with_its_passes(tmp_path: Path) -> None:
    """Groups without a signal are replaced by further prompts; 40 prompts, 8 groups in each iteration."""

    def run(watch: Watch, **options: Any) -> tuple[Any, int]:
        data = {"streaming": True, "shuffle_buffer_size": 16, "passes": 2}
        return watched(tmp_path, watch, DynamicSampling(max_rounds=3), epochs=7, **data, **options)

    saved = {after: tmp_path / f"{after}.ckpt" for after in (6, 8, 16)}  # inside an iteration, at ends of iterations
    watch = Watch(saved)
    straight, epochs = run(watch)
    assert epochs == 4  # of 22 to 24 prompts each
    for after, batches in ((6, 10), (8, 8), (16, 0)):  # at the end there is nothing left to train on
        rest = Watch()
        resumed, _ = run(rest, resume=saved[after])
        assert rest.batches == batches
        assert rest.prompts[-1:] == watch.prompts[-1:] * bool(batches)
        assert all(torch.equal(tensor, straight[name]) for name, tensor in resumed.items())
    ahead = Watch()
    assert run(ahead, staleness=2)[1] == epochs
    assert ahead.prompts == watch.prompts


@pytest.mark.parametrize(("until", "passes"), [("all", 2), ("first", 1)])
def test_a_pass_over_a_mixture_ends_as_the_mixture_says(write_rows: Write, until: Any, passes: int) -> None:
    mixture = Mixture({write_rows(ROWS[:20], "a.jsonl"): 1, write_rows(ROWS[:6], "b.jsonl"): 1}, until=until)
    data, drawn = module(mixture, passes=passes), 0
    data.trainer = trainer = L.Trainer(accelerator="cpu", logger=False)
    while not trainer.should_stop:
        advance(data, 4)
        drawn += 4
    assert drawn == {"all": 2 * 40, "first": 12}[until]


def test_prompts_of_the_next_pass_that_wait_do_not_keep_a_run_going(write_rows: Write) -> None:
    """Oversampling leaves prompts over in every iteration; those of the pass itself are still to be trained on."""
    data, used = module(write_rows(ROWS), passes=1), list[int]()
    data.trainer = trainer = L.Trainer(accelerator="cpu", logger=False)
    while not trainer.should_stop:
        queue = data.prompt_queue()
        drawn = queue.take(6)
        queue.requeue(drawn[4:])
        data.set_cursor(queue.after)
        used += [prompt.index for prompt in drawn[:4]]
    assert sorted(used) == list(range(28))  # 25 rows of the pass, in iterations of four
