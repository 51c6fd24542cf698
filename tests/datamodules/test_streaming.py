"""Streams of examples: every row once per pass, the same again from any position, and the same as without streaming."""

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_models import tiny_tokenizer

from rlhfkit.datamodules import Mixture, SFTDataModule, StreamingSFTDataModule
from rlhfkit.losses import aggregate

Write = Callable[..., str]
ROWS = [{"prompt": f"{i}+1=", "completion": "x" * (i % 4) + str(i + 1)} for i in range(25)]


def module(data: Any, **options: Any) -> StreamingSFTDataModule:
    defaults = {"tokenizer": tiny_tokenizer(), "steps_per_epoch": 3, "shuffle_block": 10}
    made = StreamingSFTDataModule(data, **(defaults | options))
    made.setup("fit")
    return made


def taken(data: StreamingSFTDataModule, count: int, place: Any = None) -> list[tuple[Any, list[int]]]:
    return [(at, example.input_ids) for at, example in itertools.islice(data.open_stream(place), count)]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "folder"])
def test_each_pass_has_every_row_once_in_blocks_of_its_own_order(write_rows: Write, name: str) -> None:
    whole = SFTDataModule(ROWS, tokenizer=tiny_tokenizer())
    whole.setup()
    expected = [whole.examples[index].input_ids for index in range(25)]
    data = module(write_rows(ROWS, name))
    found = [token_ids for _, token_ids in taken(data, 75)]
    orders = []
    for number in range(3):
        one = [expected.index(token_ids) for token_ids in found[25 * number : 25 * number + 25]]
        assert sorted(one[:10]) == list(range(10))
        assert sorted(one[10:20]) == list(range(10, 20))
        assert sorted(one[20:]) == list(range(20, 25))
        orders.append(tuple(one))
    assert len(set(orders)) == 3
    unshuffled = module(write_rows(ROWS, name), shuffle=False)
    assert [token_ids for _, token_ids in taken(unshuffled, 25)] == expected


def test_a_stream_opened_at_a_place_is_the_rest_of_it(write_rows: Write) -> None:
    data = module(write_rows([*ROWS, {"prompt": "much too long", "completion": "a"}]), max_length=10)
    whole = taken(data, 60)
    for cut in (1, 9, 10, 24, 25, 26, 49, 50):
        place = json.loads(json.dumps(whole[cut - 1][0]))  # plain values
        assert taken(data, 60 - cut, place) == whole[cut:]


def test_a_stream_of_split_documents_goes_on_within_one(write_rows: Write) -> None:
    rows = [{"text": "abcdefghij"[: 3 + 2 * i]} for i in range(4)]
    whole = SFTDataModule(rows, tokenizer=tiny_tokenizer(), max_length=4, overlong="split")
    whole.setup()
    data = module(write_rows(rows), max_length=4, overlong="split", shuffle=False)
    found = taken(data, 2 * len(whole.examples))
    expected = [whole.examples[index].input_ids for index in range(len(whole.examples))]
    assert [token_ids for _, token_ids in found] == expected * 2
    for cut in range(1, len(found)):
        assert taken(data, len(found) - cut, found[cut - 1][0]) == found[cut:]


def test_files_are_not_converted_and_other_sources_stream_too(tmp_path: Path, write_rows: Write) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(Path(write_rows(ROWS)).read_bytes()))
    expected = taken(module(ROWS), 30)
    assert taken(module(path), 30) == expected
    assert taken(module(datasets.Dataset.from_list(ROWS).to_iterable_dataset()), 30) == expected
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_sources_take_turns_by_weight(write_rows: Write) -> None:
    sources = Mixture({write_rows(ROWS, "a.jsonl"): 3, write_rows([{"text": "b"}], "b.jsonl"): 1})
    data = module(sources)
    found = taken(data, 80)
    text = tiny_tokenizer().encode("b<eos>")
    assert all(1 <= sum(ids == text for _, ids in found[i : i + 4]) <= 1 for i in range(0, 80, 4))
    assert Counter(map(tuple, (ids for _, ids in found)))[tuple(text)] == 20
    for cut in (1, 2, 3, 50):
        assert taken(data, 80 - cut, found[cut - 1][0]) == found[cut:]


def test_what_is_cut_or_left_out_is_counted(write_rows: Write, caplog: pytest.LogCaptureFixture) -> None:
    data = module(write_rows(ROWS), max_length=6, shuffle_block=25)
    taken(data, 26)
    assert "of 25 rows were truncated at max_length 6" in caplog.text
    with pytest.raises(ValueError, match="row 12, has 11 tokens, more than max_length 6"):
        taken(module(write_rows(ROWS[:1] * 12 + [ROWS[11]]), max_length=6, overlong="error", shuffle=False), 26)
    with pytest.raises(ValueError, match="no row of the whole data has a token to learn"):
        taken(module([{"prompt": "abcdef", "completion": "g"}], max_length=3), 1)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (ROWS, {"num_proc": 2}, "num_proc=2 needs all of the data at once"),
        (ROWS, {"max_tokens_per_micro_batch": 4096}, "max_tokens_per_micro_batch=4096 needs all of the data at once"),
        (ROWS, {"steps_per_epoch": 0}, "steps_per_epoch must be an integer of at least 1, got 0"),
        ([{"question": "a"}], {}, "has the columns question, which is none of the kinds"),
        ([{"text": "a", "images": "b"}], {}, "has a column 'images'"),
    ],
)
def test_bad_input_names_the_value_and_the_cure(data: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(data, **options)


class Learner(L.LightningModule):
    """A bigram model; remembers what it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(128, 128, dtype=torch.float64))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch.input_ids.tolist()
        logprobs = self.table[batch.input_ids[:, :-1]].log_softmax(-1)
        token_loss = -logprobs.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        return aggregate(token_loss, batch.loss_mask, "token-mean", batch.token_denominator)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_stopped_and_resumed_run_trains_on_the_same_rows(tmp_path: Path, write_rows: Write) -> None:
    """Three steps per epoch: saved inside an epoch and at its end, with a pass over the data ending in between."""
    path = write_rows(ROWS)

    def fit(ckpt_path: Any = None, callbacks: Any = ()) -> Learner:
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=3,
            accumulate_grad_batches=2,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        learner = Learner()
        trainer.fit(learner, module(path, micro_batch_size=2, validation_data=ROWS[:3]), ckpt_path=ckpt_path)
        assert trainer.global_step == 9
        return learner

    saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    straight = fit(callbacks=[saver])
    assert len(straight.seen) == 36
    for step in (1, 3, 4, 6, 8):
        resumed = fit(tmp_path / "saved" / f"step={step}.ckpt")
        assert resumed.seen == straight.seen[4 * step :]
        assert torch.equal(resumed.table, straight.table)
