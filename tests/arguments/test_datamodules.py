"""Every argument of every DataModule: changed, it changes what is trained or validated on, or a reason is given."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lazy_module import LazyModule
from tiny_models import chat_tokenizer, tiny_tokenizer
from torch import Tensor

from rlhfkit import (
    Mixture,
    PreferenceDataModule,
    SFTDataModule,
    StepwiseDataModule,
    UnpairedPreferenceDataModule,
)

from .table import Change, Rows, Unseen, check_none_is_ignored, observed, quiet_trainer

datasets = LazyModule("datasets")

TEMPLATE = (
    "{% if style is defined %}{{ style }}{% endif %}{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def wide() -> list[dict[str, Any]]:
    """Rows in which everything is there twice, under names that nobody would guess."""
    rows = []
    for i in range(6):
        row: dict[str, Any] = {}
        for copy in (1, 2):
            asked, said = f"{i}+{copy}=", "x" * (i % 3) + str(i + copy)
            row |= {f"q{copy}": asked, f"a{copy}": said, f"b{copy}": "y" * copy, f"t{copy}": asked + said}
            row |= {f"l{copy}": bool((i + copy) % 2), f"g{copy}": 0.5 * copy, f"s{copy}": [said, "so" * copy]}
            ids = [60 + i, 61, 62, 62 + copy]
            row |= {f"i{copy}": ids, f"y{copy}": [-100, *ids[1:-copy], *[-100] * copy], f"w{copy}": [0, 1, 1, copy % 2]}
            row |= {f"v{copy}": [True, copy == 1], f"k{copy}": f"{asked}!{said}!"}
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            row |= {f"e{copy}": f"{said}<eos>x", f"c{copy}": chat, f"d{copy}": (i * copy) % 4}
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files and tokenizers."""
    place = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", place / "cache")
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        (place / "wide.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wide()))
        (place / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in wide()[:4]))
        tiny_tokenizer().save_pretrained(place / "plain")
        chat_tokenizer(TEMPLATE).save_pretrained(place / "chat")
        yield place


class Record(L.LightningModule):
    """Writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(read(batch))
        return self.weight * 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("validation", read(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(value: Any) -> Any:
    """Tensors as lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    if hasattr(value, "__dict__"):
        return {name: read(one) for name, one in vars(value).items()}
    return [read(one) for one in value] if isinstance(value, list | tuple) else value


def batches(folder: Path, kind: type, arguments: Mapping[str, Any], around: Mapping[str, Any], built: bool) -> Any:
    """All that one epoch trains and validates on, or prompts; and the files that were written."""

    def run(own: Path, given: dict[str, Any]) -> Any:
        if kind is Mixture:
            return batches(folder, SFTDataModule, TEXT | {"data": Mixture(**given)}, around, built)
        module = Record()
        quiet_trainer(own, accumulate_grad_batches=2).fit(module, kind(**given))
        files = sorted(str(file.relative_to(own).parts[0]) for file in own.rglob("*") if file.is_file())
        return {"seen": module.seen, "files": files}

    return observed(folder, arguments, run)


TEXT: dict[str, Any] = {"data": "@wide.jsonl", "tokenizer": "@plain", "text": "t1", "micro_batch_size": 2}
ANSWERS: dict[str, Any] = {"prompt": "q1", "completion": "a1", "text": None}
VALIDATED: dict[str, Any] = {"validation_data": "@other.jsonl", "validation_split": "train"}
CHATTED: dict[str, Any] = {"tokenizer": "@chat", "prompt": "q1", "completion": "a1", "text": None}
LIMITED: dict[str, Any] = {"max_tokens_per_micro_batch": 32, "micro_batch_size": None, "max_length": 8}
TOKENS: dict[str, Any] = {"input_ids": "i1", "text": None}
STREAM = {"streaming": True, "steps_per_epoch": 1}
EXAMPLES: dict[str, Change | Unseen] = {
    "data": Change("@other.jsonl"),
    "prompt": Change("q2", given=ANSWERS),
    "completion": Change("a2", given=ANSWERS),
    "messages": Change("c2", given={"messages": "c1", "text": None, "tokenizer": "@chat"}),
    "text": Change("t2"),
    "input_ids": Change("i2", given=TOKENS),
    "labels": Change("y2", given=TOKENS | {"labels": "y1"}),
    "loss_mask": Change("w2", given=TOKENS | {"loss_mask": "w1"}),
    "numbers": Change(("d1",)),
    "validation_data": Change("@other.jsonl", given={"validation_split": "train"}),
    "split": Change("train[:50%]"),
    "validation_split": Change("train[:50%]", given=VALIDATED),
    "subset": Unseen("configurations are the hub's, which no test asks"),
    "micro_batch_size": Change(1),
    "max_tokens_per_micro_batch": Change(16, given=LIMITED),
    "max_length": Change(6),
    "overlong": Change("drop", given={"max_length": 7}),
    "drop_last": Change(True),
    "shuffle": Change(False),
    "seed": Change(1),
    "apply_chat_template": Change(False, given=CHATTED),
    "system": Change("Be brief.", given=CHATTED),
    "chat_template_kwargs": Change({"style": "!"}, given=CHATTED),
    "special_tokens_in_text": Change("escape", given={"text": "e1"}),
    "allow_image_urls": Unseen("no network in tests; without it: tests/datamodules/test_images.py"),
    "tokenizer": Change("@chat", given=ANSWERS),
    "cache_dir": Change("@tokens"),
    "num_proc": Unseen("the same examples, made by more processes: tests/datamodules/tokenization/test_cache.py"),
    "streaming": Unseen("the same rows in another order, or refused: tests/datamodules/test_streaming.py"),
    "steps_per_epoch": Change(2, given=STREAM),
    "shuffle_buffer_size": Change(1, given=STREAM),
    "passes": Change(1, given=STREAM | {"steps_per_epoch": 3}),
}
PAIRS: dict[str, Any] = {"prompt": "q1", "chosen": "a1", "rejected": "b1", "text": None}
LABELLED: dict[str, Any] = {"prompt": "q1", "completion": "a1", "label": "l1", "text": None}
STEPS: dict[str, Any] = {"prompt": "q1", "completions": "s1", "labels": "v1", "text": None}


def with_least(rows: Rows, least: Mapping[str, Any], **changed: Change | Unseen) -> Rows:
    """The same rows for data of other columns; ``given`` of a row comes last."""
    made: dict[str, Change | Unseen] = {}
    chat = {"tokenizer": "@chat"}
    for name, row in rows.items():
        if isinstance(row, Change):
            kept = {key: value for key, value in row.given.items() if key not in {*ANSWERS, "tokenizer"}}
            if row.given.get("tokenizer") == "@chat":
                kept |= chat
            row = Change(row.value, {**least, **kept}, row.around, row.built, row.refused)
        made[name] = row
    return made | changed


def columns(least: Mapping[str, Any], refused: bool = False, **values: Any) -> dict[str, Change]:
    """Of a kind of data, or of another one."""
    return {name: Change(value, given=least, refused=refused) for name, value in values.items()}


MARKED = {"text": "k1", "labels": "v1", "step_token": "!"}
TABLE: dict[type, Rows] = {
    SFTDataModule: EXAMPLES,
    PreferenceDataModule: with_least(
        EXAMPLES,
        PAIRS,
        **columns(PAIRS, chosen="a2", rejected="b2", margin="g1"),
        special_tokens_in_text=Change("escape", given=PAIRS | {"chosen": "e1"}),
        **columns(
            PAIRS, refused=True, completion="a1", messages="c1", text="t1", input_ids="i1", labels="y1", loss_mask="w1"
        ),
    ),
    UnpairedPreferenceDataModule: with_least(
        EXAMPLES,
        LABELLED,
        **columns(PAIRS, chosen="a2", rejected="b2"),
        label=Change("l2", given=LABELLED),
        special_tokens_in_text=Change("escape", given=LABELLED | {"completion": "e1"}),
        **columns(LABELLED, refused=True, messages="c1", text="t1", input_ids="i1", labels="y1", loss_mask="w1"),
    ),
    StepwiseDataModule: with_least(
        EXAMPLES,
        STEPS,
        **columns(STEPS, completions="s2", labels="v2", separator=";"),
        special_tokens_in_text=Change("escape", given=STEPS | {"prompt": "e1"}),
        overlong=Change("drop", given=STEPS | {"max_length": 9}),
        text=Change("k2", given=MARKED),
        step_token=Change("=", given=MARKED, refused=True),
        **columns(STEPS, refused=True, completion="a1", messages="c1", input_ids="i1", loss_mask="w1"),
    ),
    Mixture: {
        "weights": Change([("@wide.jsonl", 3.0), ("@other.jsonl", 1.0)]),
        "until": Change("first"),
    },
}
LEAST_OF: dict[type, dict[str, Any]] = {
    Mixture: {"weights": [("@wide.jsonl", 1.0), ("@other.jsonl", 1.0)], "until": "all"},
}


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.long
def test_no_argument_is_accepted_and_ignored(folder: Path, kind: type) -> None:
    check_none_is_ignored(kind, TABLE[kind], LEAST_OF.get(kind, TEXT), partial(batches, folder))
