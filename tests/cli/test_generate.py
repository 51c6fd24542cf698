"""``rlhfkit generate`` on a tiny model: its output, and what an interruption costs. Covers ``progress.py`` too."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import chat_tokenizer, tiny_model, tiny_tokenizer, token_logprobs

from rlhfkit import LocalEngine, Prompt, Sample, SamplingSpec
from rlhfkit.cli.generate import generate
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.cli.main import main
from rlhfkit.models import load_causal_lm

ROWS = [{"question": f"{i}+{i}" + "=" * (i % 3), "answer": str(2 * i), "tags": ["a", "b"]} for i in range(10)]
SAMPLING = SamplingSpec(group_size=3, max_new_tokens=6, temperature=0.7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("generate") / "model"))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a run without interruption."""
    return run(model, tmp_path_factory.mktemp("whole") / "out.jsonl")


def run(model: str, output: Path, data: Any = ROWS, **arguments: Any) -> Path:
    options = {"prompt": "question", "sampling": SAMPLING, "batch_size": 4, "progress": False}
    return generate(model, data, output, **(options | arguments))


class Breaks(LocalEngine):
    """Fails in a later batch."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().generate(prompts, sampling, iteration=iteration)


class Seen(LocalEngine):
    """Keeps the type that it was started in."""

    dtype: torch.dtype | None = None

    def start(self, model: str, *, dtype: torch.dtype, **options: Any) -> None:
        self.dtype = dtype
        super().start(model, dtype=dtype, **options)


def test_lines_are_the_rows_in_order_with_their_completions(model: str, whole: Path) -> None:
    lines = read_lines(whole)
    assert [(line["index"], line["sample_index"]) for line in lines] == [(i, s) for i in range(10) for s in range(3)]
    tokenizer, policy = tiny_tokenizer(), load_causal_lm(model).eval()
    for line in lines:
        assert {name: line[name] for name in ROWS[0]} == ROWS[line["index"]]
        prompt, completion = line["prompt_ids"], line["completion_ids"]
        assert prompt == tokenizer(line["question"])["input_ids"]
        assert line["completion"] == tokenizer.decode(completion, skip_special_tokens=True)
        assert line["finish_reason"] == ("stop" if completion[-1] == tokenizer.eos_token_id else "length")
        logprobs = token_logprobs(policy, prompt + completion, SAMPLING.temperature)[len(prompt) - 1 :]
        assert line["logprob"] == pytest.approx(logprobs.sum().item(), abs=1e-4)
    assert len({line["completion"] for line in lines}) > 20


def test_a_second_start_finishes_an_interrupted_file_with_the_same_samples_and_leaves_a_finished_one(
    model: str, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(model, output, engine=Breaks(1))
    assert len(read_lines(output)) == 4 * 3
    output.write_bytes(output.read_bytes()[:-7])  # and the last line was torn
    run(model, output)
    rows, expected = read_lines(output), read_lines(whole)
    # With AVX2 the last bits of a product of matrices depend on how many rows they have.
    logprobs = [[row.pop("logprob") for row in each] for each in (rows, expected)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)
    assert rows == expected
    before = output.stat().st_mtime_ns
    idle = Seen()
    run(model, output, engine=idle)
    assert (output.stat().st_mtime_ns, idle.dtype) == (before, None)  # no model is loaded


def test_a_model_that_was_trained_on_is_noticed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    output = run(str(model), tmp_path / "out.jsonl")
    tiny_model(tmp_path / "model", seed=1)
    before = read_lines(output)
    with pytest.raises(ValueError, match=r"was written with other settings.*weights.*overwrite"):
        run(str(model), output)
    assert read_lines(output) == before
    run(str(model), output, overwrite=True)
    after = read_lines(output)
    assert len(after) == len(before)
    assert after != before


def test_columns_can_be_chosen_and_never_clash(model: str, tmp_path: Path) -> None:
    rows = [row | {"completion": "the reference"} for row in ROWS]
    with pytest.raises(ValueError, match=r"writes itself: completion.*columns="):
        run(model, tmp_path / "out.jsonl", rows)
    with pytest.raises(ValueError, match="columns: 'answers' is not a column of the given rows; it has question"):
        run(model, tmp_path / "out.jsonl", rows, columns=["answers"])
    run(model, tmp_path / "out.jsonl", rows, columns=["answer"], token_ids=False)
    written = ["question", "answer", "completion", "index", "sample_index", "finish_reason", "logprob"]
    assert list(read_lines(tmp_path / "out.jsonl")[0]) == written


def test_chat_prompts_go_through_the_template_and_come_back_as_they_were(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(folder)
    chat = [{"role": "user", "content": "1+1"}]
    output = run(str(folder), tmp_path / "out.jsonl", [{"question": chat}], system="Be brief")
    line = read_lines(output)[0]
    assert line["question"] == chat
    assert tokenizer.decode(line["prompt_ids"]) == "<s>Be brief;<u>1+1;<a>"


def test_the_command_line_reaches_sampling_and_engine(model: str, whole: Path, tmp_path: Path) -> None:
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = ["generate", model, str(data), str(output), "--prompt", "question", "--progress", "false"]
    words += ["--sampling.group_size", "3", "--sampling.max_new_tokens", "6", "--sampling.temperature", "0.7"]
    main([*words, "--engine", "rlhfkit.LocalEngine", "--engine.max_sequences", "5"])
    ids = [[line["completion_ids"] for line in read_lines(path)] for path in (output, whole)]
    assert ids[0] == ids[1]


@pytest.mark.vllm
@pytest.mark.ray
def test_vllm_generates_what_the_local_engine_does(vllm_model: Path, vllm_pool: Any, tmp_path: Path) -> None:
    from rlhfkit.rollout import ModuleWeights

    vllm_pool.load(ModuleWeights(load_causal_lm(str(vllm_model))), version=0)
    greedy = SamplingSpec(group_size=1, max_new_tokens=6, temperature=0.0)
    files = [
        run(str(vllm_model), tmp_path / f"{name}.jsonl", sampling=greedy, engine=engine)
        for name, engine in {"vllm": vllm_pool, "local": LocalEngine()}.items()
    ]
    made, expected = map(read_lines, files)
    assert [line["completion_ids"] for line in made] == [line["completion_ids"] for line in expected]


@pytest.mark.parametrize(("precision", "expected"), [(None, torch.bfloat16), ("32-true", torch.float32)])
def test_the_model_computes_in_the_type_it_is_saved_in(tmp_path: Path, precision: str | None, expected: Any) -> None:
    folder, engine = tiny_model(tmp_path / "model"), Seen()
    load_causal_lm(str(folder), dtype=torch.bfloat16).save_pretrained(folder)
    run(str(folder), tmp_path / "out.jsonl", ROWS[:1], engine=engine, precision=precision)
    assert engine.dtype == expected
