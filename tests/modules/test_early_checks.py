"""Data, models and settings that would fail or spoil a run are refused when it starts.

Covers ``modules/base.py``, ``teachers.py`` and ``callbacks/rollout/checks.py``.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import digits, fit_run
from tiny_models import tiny_model, tiny_tokenizer
from transformers import AutoTokenizer

from modules.data_runs import data, folder_of, trainer
from rlhfkit import (
    DistillationModule,
    DPOModule,
    KTOModule,
    ProcessRewardModule,
    RolloutCallback,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.datamodules import PreferenceDataModule, StepwiseDataModule, UnpairedPreferenceDataModule
from rlhfkit.models import load_causal_lm

folder = folder_of()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), context=32))


run = functools.partial(trainer, max_steps=1)


def larger_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<tool{index}>" for index in range(40)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        (
            larger_tokenizer(),
            {},
            r"has 11 tokens that the model does not know, such as '<tool\d+>' \(1\d\d\): .* tokens 0 to 127. Use the",
        ),
        (None, {"gradient_clip_val": float("nan")}, "gradient_clip_val=.* got nan"),
    ],
)
def test_the_message_says_value_rule_and_cure(
    model: str, tmp_path: Path, tokenizer: Any, options: dict[str, Any], message: str
) -> None:
    data = SFTDataModule([{"text": "abc"}], text="text", micro_batch_size=1, max_length=16, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, **options).fit(SFTModule(model), data)


SHORT, LONG = "b" * 8, "a" * 36
PAIRS = [{"prompt": "1+", "chosen": "b", "rejected": SHORT}, {"prompt": "2+", "chosen": SHORT, "rejected": LONG}]
UNPAIRED = [{"prompt": f"{i}+", "completion": (SHORT, LONG)[i // 3], "label": i == 1} for i in (1, 2, 3)]
STEPS = [{"prompt": "1+", "completions": ["b", LONG][:n], "labels": [True, False][:n]} for n in (1, 2)]
KINDS: dict[str, tuple[Any, Any, list[dict[str, Any]], str]] = {
    "texts": (SFTModule, SFTDataModule, [{"prompt": "", "completion": text} for text in ("b", LONG)], "row 1, has 37"),
    "preference pairs": (DPOModule, PreferenceDataModule, PAIRS, "row 1, has 39"),
    "unpaired answers": (KTOModule, UnpairedPreferenceDataModule, UNPAIRED, "row 2, has 39"),
    "pairs taken apart": (KTOModule, UnpairedPreferenceDataModule, PAIRS, "row 1, has 39"),
    "judged steps": (ProcessRewardModule, StepwiseDataModule, STEPS, "row 1, has 41"),
}


@pytest.mark.parametrize("where", ["data", "validation_data"])
@pytest.mark.parametrize("name", KINDS)
def test_rows_beyond_the_context_are_refused_by_every_kind_of_data(
    model: str, tmp_path: Path, name: str, where: str
) -> None:
    module, kind, rows, place = KINDS[name]
    sources = {"data": rows[:-1], where: rows}
    message = rf"given rows, {place} tokens within max_length 64, .* context of 32: lower it, max_length=32, or"
    with pytest.raises(ValueError, match=message):
        run(tmp_path).fit(module(model), kind(**sources, micro_batch_size=2, max_length=64))
    if where == "data":  # the cure that it names
        run(tmp_path).fit(module(model), kind(rows, micro_batch_size=len(rows), max_length=32))


def test_what_is_kept_for_another_model_is_checked_for_this_one(model: str, tmp_path: Path) -> None:
    module, kind, rows, place = KINDS["preference pairs"]
    longer = str(tiny_model(tmp_path / "longer", context=64))
    options = {"micro_batch_size": 2, "max_length": 64, "cache_dir": tmp_path / "cache"}
    run(tmp_path).fit(module(longer), kind(rows, **options))
    with pytest.raises(ValueError, match=place):
        run(tmp_path).fit(module(model), kind(rows, **options))


def test_mismatched_pairs_are_cut_to_the_context(model: str, tmp_path: Path) -> None:
    rows = [
        {"prompt": "1" * 20, "completion": "b", "label": True},
        {"prompt": "2", "completion": "a" * 25, "label": False},
    ]
    data = UnpairedPreferenceDataModule(rows, micro_batch_size=2, max_length=64)
    run(tmp_path).fit(KTOModule(model), data)
    lengths = [len(data.examples[index].mismatched.input_ids) for index in range(2)]  # type: ignore[index]
    assert lengths == [32, 3]  # 20 + 26 tokens are cut, 1 + 2 are not


def test_a_stream_names_the_row_beyond_the_context_when_it_is_drawn(model: str, tmp_path: Path) -> None:
    file = tmp_path / "stream.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("abc", "abcd", LONG)))
    fitted = run(tmp_path, max_steps=3)
    data = SFTDataModule(
        str(file), streaming=True, text="text", steps_per_epoch=3, micro_batch_size=1, shuffle=False, max_length=64
    )
    with pytest.raises(ValueError, match=r"stream\.jsonl, row 2, has 37 tokens .* context of 32: .* max_length=32"):
        fitted.fit(SFTModule(model), data)
    assert fitted.global_step > 0


def test_answers_that_nothing_ends_are_refused(tmp_path: Path) -> None:
    """Unless a text does."""
    folder = tiny_model(tmp_path / "model")
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        written = json.loads((folder / file).read_text())
        (folder / file).write_text(
            json.dumps({key: None if "eos_token" in key else one for key, one in written.items()})
        )
    with pytest.raises(ValueError, match=r"nothing ends an answer of .*model: its tokenizer has no end-of-seq"):
        fit_run(tmp_path)
    sampling = SamplingSpec(group_size=4, max_new_tokens=4, stop="1")
    fit_run(tmp_path, rollouts=RolloutCallback(digits, sampling=sampling), max_steps=1)


def test_a_teacher_of_another_vocabulary_is_refused_and_one_that_is_padded_is_not(folder: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ValueError, match=r"other tokens than the student .*\(100 and 99; 1 differ, e.g. \['<think>'\]"):
        trainer(tmp_path).fit(DistillationModule(str(folder / "model"), str(other)), data(folder, DistillationModule))
    padded = load_causal_lm(str(folder / "teacher"))
    padded.resize_token_embeddings(160, mean_resizing=False)
    with torch.no_grad():
        padded.lm_head.weight[128:] = 0
        padded.lm_head.weight[128:, 0] = -100
    padded.save_pretrained(tmp_path / "padded")
    tiny_tokenizer().save_pretrained(tmp_path / "padded")
    losses = []
    for teacher in (folder / "teacher", tmp_path / "padded"):
        module = DistillationModule(str(folder / "model"), str(teacher))
        checked = data(folder, DistillationModule, validated=True)
        losses.append(trainer(tmp_path).validate(module, checked, verbose=False)[0]["val/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
