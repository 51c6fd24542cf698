"""What would fail in the middle of a run, or spoil it, is refused when it begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from rl_runs import setup_run
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import SamplingSpec, SFTDataModule, SFTModule
from rlhfkit.callbacks.prompt_check import check_prompts
from rlhfkit.models import load_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model"), context=32))


def fit(model: str, folder: Path, rows: list[dict[str, str]], data: dict[str, Any], **trainer: Any) -> None:
    options = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False}
    run = L.Trainer(**(options | trainer), enable_progress_bar=False, default_root_dir=folder)
    run.fit(SFTModule(model), SFTDataModule(rows, text="text", micro_batch_size=1, **data))


def larger_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<tool{index}>" for index in range(40)])
    return tokenizer


@pytest.mark.parametrize(
    ("rows", "data", "trainer", "message"),
    [
        ([{"text": "a" * 40}], {"max_length": 64}, {}, r"given rows, row 0, has 41 tokens .* more than the .* of 32"),
        (
            [{"text": "abc"}],
            {"max_length": 16, "tokenizer": larger_tokenizer()},
            {},
            r"has 11 tokens that the model does not know, such as '<tool\d+>' \(1\d\d\): .* tokens 0 to 127. Use the",
        ),
        ([{"text": "abc"}], {"max_length": 16}, {"gradient_clip_val": float("nan")}, "gradient_clip_val=.* got nan"),
    ],
)
def test_the_message_says_value_rule_and_cure(
    model: str, tmp_path: Path, rows: list[dict[str, str]], data: dict[str, Any], trainer: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(model, tmp_path, rows, data, **trainer)


def test_what_fits_is_taken(model: str, tmp_path: Path) -> None:
    fit(model, tmp_path, [{"text": "a" * 31}], {"max_length": 32}, gradient_clip_val=1.0)


def test_answers_that_nothing_ends_are_refused(tmp_path: Path) -> None:
    import transformers

    folder = tiny_model(tmp_path / "endless")
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.eos_token_id = None
    config.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).eos_token_id is None
    trainer, module, data, rollouts = setup_run(tmp_path / "run")
    module.hparams["model"], module._tokenizer = str(folder), None
    with pytest.raises(ValueError, match=r"nothing ends an answer of .*endless: its tokenizer has no end-of-seq"):
        trainer.fit(module, data)
    checked: list[Callable[..., Any]] = []
    data.check_prompts = lambda **limits: checked.append(limits)  # type: ignore[method-assign]
    check_prompts(trainer, module, rollouts.engine, SamplingSpec(max_new_tokens=4, stop=("\n",)))
    assert len(checked) == 1
