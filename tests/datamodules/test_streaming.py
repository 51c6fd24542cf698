"""Streams of examples: every row once per pass, the same again from any position, and the same as without streaming.

Covers streaming.py.
"""

import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_module import LazyModule
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_models import chat_tokenizer, tiny_tokenizer

from rlhfkit.data import StepLoader, TokenBatch
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.datamodules import (
    Mixture,
    PreferenceDataModule,
    SFTDataModule,
    StepwiseDataModule,
    UnpairedPreferenceDataModule,
)
from rlhfkit.datamodules.streaming import MixedStream, RowReader, SourceStream

from .opened import Write, opened

datasets = LazyModule("datasets")

ROWS = [{"prompt": f"{i}+1=", "completion": "x" * (i % 4) + str(i + 1)} for i in range(25)]


module = partial(opened, SFTDataModule, streaming=True, steps_per_epoch=3, shuffle_buffer_size=10)


def whole(rows: Any, **options: Any) -> list[list[int]]:
    """Tokens of all examples, not streamed."""
    data = module(rows, streaming=False, steps_per_epoch=None, shuffle_buffer_size=10_000, **options)
    return [data.examples[index].input_ids for index in range(len(data.examples))]


def taken(data: SFTDataModule, count: int, place: Any = None) -> list[tuple[Any, list[int]]]:
    return [(at, example.input_ids) for at, example in itertools.islice(data.stream.open(place), count)]


def test_each_pass_has_every_row_once_in_blocks_of_its_own_order(write_rows: Write, tmp_path: Path) -> None:
    expected = whole(ROWS)
    found = [expected.index(token_ids) for _, token_ids in taken(module(write_rows(ROWS)), 75)]
    passes = [tuple(found[first : first + 25]) for first in (0, 25, 50)]
    for one in passes:
        assert [*sorted(one[:10]), *sorted(one[10:20]), *sorted(one[20:])] == list(range(25))
    assert len(set(passes)) == 3
    unshuffled = module(write_rows(ROWS), shuffle=False)
    assert [token_ids for _, token_ids in taken(unshuffled, 25)] == expected
    assert not list(tmp_path.rglob("*.arrow"))  # files are not converted


def test_sources_take_turns_by_weight(write_rows: Write) -> None:
    sources = Mixture({write_rows(ROWS, "a.jsonl"): 3, write_rows([{"text": "b"}], "b.jsonl"): 1})
    data = module(sources)
    found = taken(data, 80)
    text = tiny_tokenizer().encode("b<eos>")
    assert all(1 <= sum(ids == text for _, ids in found[i : i + 4]) <= 1 for i in range(0, 80, 4))
    assert Counter(map(tuple, (ids for _, ids in found)))[tuple(text)] == 20
    for cut in (1, 2, 3, 50):
        assert taken(data, 80 - cut, found[cut - 1][0]) == found[cut:]


@given(
    sources=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9).filter(any), min_size=1, max_size=3),
    block=st.integers(1, 5),
    shuffled=st.booleans(),
    sizes=st.lists(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]), min_size=2, max_size=2),
    micro=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    stop=st.integers(0, 9),
)
def test_no_row_is_lost_or_doubled_by_a_stop_and_another_number_of_ranks(
    sources: Any, block: int, shuffled: bool, sizes: Any, micro: int, accumulate: int, stop: int
) -> None:
    """Row i of a source becomes as many examples as the source says; tokens number source, row and part."""

    def source(number: int) -> SourceStream[TokenExample]:
        rows = [{"row": row, "parts": parts} for row, parts in enumerate(sources[number])]
        return SourceStream(
            RowReader(lambda: iter(rows)),
            lambda placed: (
                [TokenExample([1 + number, 1 + row["row"], 1 + part], [True] * 3) for part in range(row["parts"])]
                for _, row in placed
            ),
            columns=["row"],
            block=block,
            seed=7 if shuffled else None,
        )

    mixture = Mixture([(number, 1) for number in range(len(sources))])

    def stream() -> MixedStream[TokenExample]:
        return MixedStream(mixture, [source(number) for number in range(len(sources))])

    def ranks(world: int, together: int) -> list[StepLoader[TokenBatch]]:
        options = {"steps_per_epoch": 3, "micro_batch_size": micro, "accumulate": accumulate}
        return [
            StepLoader(stream(), collate_tokens, rank=rank, world_size=world, ranks_per_forward=together, **options)
            for rank in range(world)
        ]

    def trained(batches: Any) -> list[tuple[int, ...]]:
        return [tuple(row) for batch in batches if batch.loss_mask.any() for row in batch.input_ids.tolist()]

    first, second = ranks(*sizes[0]), ranks(*sizes[1])
    seen: list[tuple[int, ...]] = []
    for one in first:
        for _ in range(stop // 3):  # epochs
            seen += trained(one)
        seen += trained(itertools.islice(one, stop % 3 * accumulate)) if stop % 3 else []
    state = json.loads(json.dumps(first[0].state_dict()))
    assert all(one.state_dict() == state for one in first)
    for one in second:
        one.load_state_dict(state)
    epochs = [[*one, *one] for one in second]
    assert len({len(batches) for batches in epochs}) == 1
    seen += trained(itertools.chain(*epochs))
    expected = [tuple(example.input_ids) for _, example in itertools.islice(stream().open(), len(seen))]
    assert sorted(seen) == sorted(expected)
    for number, parts in enumerate(sources):  # a pass has each row once
        own = [one[1:] for one in expected if one[0] == 1 + number]
        one_pass = [(1 + row, 1 + part) for row, count in enumerate(parts) for part in range(count)]
        for begin in range(0, len(own) - len(one_pass) + 1, len(one_pass)):
            assert sorted(own[begin : begin + len(one_pass)]) == one_pass


PAIRS = [{"prompt": f"{i}=", "chosen": "x" * (i % 7) + "1", "rejected": "2" * (i % 3), "margin": i} for i in range(20)]
IMPLICIT = [{"chosen": f"{i}=" + "a" * (i % 4), "rejected": f"{i}=b"} for i in range(20)]
STEPS = [{"prompt": f"{i}=", "completions": ["a", "b" * (i % 5 + 1)], "labels": [True, bool(i % 2)]} for i in range(20)]
ANSWERS = [{"prompt": f"{i}=", "completion": "x" * (i % 7) + "1", "label": bool(i % 3)} for i in range(20)]
DOCUMENTS = [{"text": "abcdefghij"[: i % 11]} for i in range(20)]
SHEPHERD = [{"input": f"{i}=a!b!", "labels": f"{i}=a+b{'+-'[i % 2]}"} for i in range(20)]


@pytest.mark.parametrize(
    ("kind", "rows", "options"),
    [
        (PreferenceDataModule, PAIRS, {}),
        (PreferenceDataModule, PAIRS, {"max_length": 7, "overlong": "drop"}),
        (PreferenceDataModule, IMPLICIT, {"max_length": 6}),
        (StepwiseDataModule, STEPS, {"max_length": 7}),
        (StepwiseDataModule, SHEPHERD, {"text": "input", "step_token": "!"}),
        (SFTDataModule, DOCUMENTS, {"max_length": 4, "overlong": "split"}),
    ],
)
def test_pairs_steps_and_parts_of_documents_are_those_of_a_file_that_was_read_as_a_whole(
    write_rows: Write, kind: Any, rows: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    examples = opened(kind, write_rows(rows), shuffle=False, **options).examples
    expected = [examples[index] for index in range(len(examples))]
    said = [record.message for record in caplog.records if "rows" in record.message or "of 20 pairs" in record.message]
    caplog.clear()
    data = opened(kind, write_rows(rows), shuffle=False, **options, streaming=True, steps_per_epoch=2)
    found = list(itertools.islice(data.stream.open(), 2 * len(expected)))
    assert [example for _, example in found] == expected * 2
    assert {record.message for record in caplog.records if "of 20" in record.message} == set(said)
    for cut in (1, 7, len(expected)):
        rest = itertools.islice(data.stream.open(found[cut - 1][0]), 5)
        assert [example for _, example in rest] == (expected * 2)[cut : cut + 5]
    assert [example.num_tokens for example in expected] == examples.lengths
    assert [example.targets for example in expected] == examples.targets


@pytest.mark.parametrize("rows", [ANSWERS, PAIRS])
def test_a_step_of_all_labelled_answers_is_that_of_a_file_that_was_read_as_a_whole(
    write_rows: Write, rows: Any
) -> None:
    """With its mismatched pairs, which the same seed draws."""
    common = {"tokenizer": tiny_tokenizer(), "shuffle": False, "max_length": 9, "overlong": "drop", "seed": 3}
    count, found = 16 if rows is ANSWERS else 36, []  # of 20 or 40, of which 4 are too long
    for options in ({}, {"streaming": True, "steps_per_epoch": 2}):
        data = UnpairedPreferenceDataModule(write_rows(rows), micro_batch_size=count, **common, **options)
        data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        data.setup("fit")
        found.append(next(iter(data.train_dataloader())))
    one, other = found
    assert len(one) == count
    assert len(one.mismatched) == len(other.mismatched) == 1
    for left, right in ((one, other), (one.mismatched[0], other.mismatched[0])):
        left, right = ({**batch.state_dict(), "mismatched": None} for batch in (left, right))
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_a_bad_pair_is_named_when_it_is_read() -> None:
    rows = [*PAIRS[:3], PAIRS[3] | {"rejected": None}]
    options = {"streaming": True, "steps_per_epoch": 1, "shuffle": False}
    data = opened(PreferenceDataModule, iter([rows, rows]).__next__, **options)
    with pytest.raises(ValueError, match=r"column 'rejected' of the given rows, row 3, has no value"):
        list(itertools.islice(data.stream.open(), 4))


def test_rows_need_no_types_of_a_table_and_are_checked_when_they_are_read() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    row = {"messages": [parts, {"role": "assistant", "content": "yo"}], "extra": [1, "a", object()]}
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}")
    data = module(lambda: iter([row]), tokenizer=tokenizer)
    assert tokenizer.decode(taken(data, 1)[0][1]) == "hi<eos>yo<eos>"
    # A table tells before training that some of its rows have images.
    rows = [{"text": "a", "image": None}, {"text": "b"}, {"text": "c", "image": "c.png"}]
    data = module(lambda: iter(rows), shuffle=False, shuffle_buffer_size=1)
    with pytest.raises(ValueError, match="the given rows, row 2 has a column 'image', and the model reads text only"):
        taken(data, 3)
    other = {"role": "user", "content": [{"type": "image", "url": "a"}]}
    with pytest.raises(ValueError, match=r"row 0, cannot be read: the content of a chat message must be text"):
        module(lambda: iter([{"messages": [other, row["messages"][1]]}]), tokenizer=tokenizer)


def test_a_checkpoint_of_other_data_seed_or_blocks_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    def started(data: Any = ROWS, **options: Any) -> SFTDataModule:
        made = module(data, micro_batch_size=2, **options)
        made.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        return made

    stopped = started()
    list(itertools.islice(stopped.train_dataloader(), 2))
    changes: list[dict[str, Any]] = [{"seed": 1}, {"shuffle_buffer_size": 9}, {"data": ROWS[::-1]}, {"shuffle": False}]
    for options in [{}, *changes, {"data": [*ROWS, ROWS[3]], "max_length": 99}]:
        caplog.clear()
        resumed = started(**options)
        resumed.load_state_dict(stopped.state_dict())
        batch = next(iter(resumed.train_dataloader()))
        assert ("a new pass begins" in caplog.text) == (options in changes)
        first = next(iter(started(**options).train_dataloader()))
        assert torch.equal(batch.input_ids, first.input_ids) == (options in changes)


def test_what_is_too_long_or_teaches_nothing_is_refused_where_it_is_read(write_rows: Write) -> None:
    with pytest.raises(ValueError, match="row 12, has 11 tokens, more than max_length 6"):
        taken(module(write_rows(ROWS[:1] * 12 + [ROWS[11]]), max_length=6, overlong="error", shuffle=False), 26)
    with pytest.raises(ValueError, match="no row of the whole data has a token to learn"):
        taken(module([{"prompt": "abcdef", "completion": "g"}], max_length=3), 1)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (ROWS, {"num_proc": 2}, "num_proc=2 needs all of the data at once"),
        (ROWS, {"max_tokens_per_micro_batch": 4096}, "max_tokens_per_micro_batch=4096 needs all of the data at once"),
        (ROWS, {"steps_per_epoch": None}, "give steps_per_epoch"),
        (ROWS, {"streaming": False}, "steps_per_epoch=3 is for streaming=True"),
        (ROWS, {"streaming": False, "steps_per_epoch": None, "passes": 2}, "passes=2 ends a run over a stream"),
    ],
)
def test_bad_input_names_the_value_and_the_cure(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(data, **options)


class Learner(L.LightningModule):
    """Remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch.input_ids.tolist()
        return self.weight * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(data: SFTDataModule, folder: Path, *, resume: Any = None, **options: Any) -> tuple[L.Trainer, Learner]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"default_root_dir": folder, "enable_checkpointing": bool(options.get("callbacks"))}
    trainer, learner = L.Trainer(accelerator="cpu", **quiet, **options), Learner()
    trainer.fit(learner, data, ckpt_path=resume)
    return trainer, learner


def test_stopped_and_resumed_run_trains_on_the_same_rows(tmp_path: Path, write_rows: Write) -> None:
    """Three steps per epoch: saved inside an epoch and at its end, with a pass over the data ending in between."""
    path = write_rows(ROWS)

    def run(**options: Any) -> Learner:
        data = module(path, micro_batch_size=2, validation_data=ROWS[:3])
        trainer, learner = fit(data, tmp_path, max_epochs=3, accumulate_grad_batches=2, **options)
        assert trainer.global_step == 9
        return learner

    straight = run(callbacks=[ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)])
    assert len(straight.seen) == 36
    for step in (1, 3, 4, 6, 8):
        resumed = run(resume=tmp_path / "saved" / f"step={step}.ckpt")
        assert resumed.seen == straight.seen[4 * step :]


def test_loaders_that_are_made_anew_in_each_epoch_go_on_in_the_stream(tmp_path: Path) -> None:
    once, anew = (
        fit(module(ROWS, micro_batch_size=2), tmp_path, max_epochs=3, reload_dataloaders_every_n_epochs=every)[1].seen
        for every in (0, 1)
    )
    assert anew == once


@pytest.mark.parametrize(("passes", "steps"), [(1, 7), (2, 13)])
def test_a_run_ends_with_the_step_in_which_its_passes_do(
    write_rows: Write, tmp_path: Path, passes: int, steps: int
) -> None:
    """25 rows, 4 in each step; validation runs at the end, and a resumed run has nothing left to do."""

    def run(resume: Any = None) -> tuple[L.Trainer, Learner]:
        data = module(write_rows(ROWS), micro_batch_size=2, steps_per_epoch=5, passes=passes, validation_data=ROWS[:3])
        return fit(data, tmp_path, resume=resume, max_epochs=9, accumulate_grad_batches=2, num_sanity_val_steps=0)

    trainer, learner = run()
    assert trainer.global_step == steps
    assert len(learner.seen) == 4 * steps
    assert len({tuple(ids[: ids.index(1)]) for ids in learner.seen}) == 25
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    again, idle = run(tmp_path / "end.ckpt")
    assert (again.global_step, idle.seen) == (steps, [])
