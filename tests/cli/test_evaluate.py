"""``rlhfkit evaluate``: the files it writes, from a model and from completions that are there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from cli.test_generate import Seen
from rlhfkit import Sample, SamplingSpec
from rlhfkit.cli.evaluate import evaluate
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.cli.main import main
from rlhfkit.rewards import exact_match
from rlhfkit.rewards.benchmarks import GradedSample, metrics_by_source

ROWS = [{"question": f"{i}+1=", "answer": str(i + 1), "level": "hard" if i % 2 else "easy"} for i in range(6)]


def two_tokens(samples: Sequence[Sample]) -> list[float]:
    """1 for an answer of more than one token."""
    return [float(sample.num_tokens > 1) for sample in samples]


def test_a_model_is_sampled_graded_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_model(tmp_path / "model"))
    options: dict[str, Any] = {"grader": two_tokens, "prompt": "question", "source": "level", "progress": False}
    sampling = SamplingSpec(group_size=4, max_new_tokens=2, stop_token_ids=tuple(range(64)))
    options |= {"precision": "bf16-true"}
    engine = Seen()
    folder = evaluate(ROWS, tmp_path / "run", model=model, sampling=sampling, engine=engine, **options)
    assert engine.dtype == torch.bfloat16
    graded = read_lines(folder / "graded.jsonl")
    assert [line["index"] for line in graded] == [i for i in range(6) for _ in range(4)]
    assert all(line["reward"] == float(len(line["completion_ids"]) > 1) for line in graded)
    assert {line["reward"] for line in graded} == {0.0, 1.0}
    metrics = {line.pop("source"): line for line in read_lines(folder / "metrics.jsonl")}
    assert list(metrics) == ["all", "easy", "hard"]
    assert metrics["all"]["questions"] == 6
    assert metrics["all"]["avg@4"] == pytest.approx(sum(line["reward"] for line in graded) / 24)
    assert capsys.readouterr().out.endswith((folder / "metrics.md").read_text())
    before = (folder / "graded.jsonl").read_text()
    evaluate(ROWS, tmp_path / "run", model=model, sampling=sampling, **options)  # nothing is left to do
    assert (folder / "graded.jsonl").read_text() == before


def test_completions_that_are_there_are_graded_by_the_command(tmp_path: Path) -> None:
    lines = [{"question": "1+1=", "answer": "2", "text": text} for text in ("2", "so 2", "3", "2")] + [
        {"question": "2+2=", "answer": "4", "text": text} for text in ("5", "5", "4", "6")
    ]
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["evaluate", str(data), str(tmp_path / "run"), "--grader", "rlhfkit.rewards.exact_match"]
    main([*words, "--prompt", "question", "--completion", "text", "--progress", "false"])
    (metrics,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    expected = metrics_by_source(
        [GradedSample("1", reward, vote) for reward, vote in ((1, "2"), (0, "2"), (0, "3"), (1, "2"))]
        + [GradedSample("2", reward, vote) for reward, vote in ((0, "5"), (0, "5"), (1, "4"), (0, "6"))]
    )
    assert metrics == {"source": "all", **expected["all"]}
    assert metrics["avg@4"] == pytest.approx(3 / 8)


def test_a_missing_column_is_an_error_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source='topic' is not a column"):
        evaluate(ROWS, tmp_path / "run", grader=exact_match, model="none", prompt="question", source="topic")
