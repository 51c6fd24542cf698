"""``rlhfkit score``: rewards of lines."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rewards.samples import tokenized
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import Sample
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.cli.main import main
from rlhfkit.cli.score import score
from rlhfkit.models.heads import load_scalar_model
from rlhfkit.rewards import FormatReward, ModelReward, WeightedSum, exact_match

LINES = [
    {
        "question": "17+25=",
        "answer": "so #### 42",
        "completion": text,
        "index": 5,
        "sample_index": place,
        "finish_reason": "length" if place else "stop",
        "prompt_ids": [1, 2],
        "completion_ids": list(range(place + 1)),
    }
    for place, text in enumerate(["42", "41", "402"])
]


def run(output: Path, **arguments: object) -> list[dict]:
    options = {"reward": exact_match, "prompt": "question", "answer": "answer", "progress": False}
    return read_lines(score(LINES, output, **(options | arguments)))


def test_a_reward_is_added_and_nothing_else_changes(tmp_path: Path) -> None:
    assert run(tmp_path / "out.jsonl", batch_size=2) == [
        line | {"reward": reward} for line, reward in zip(LINES, [1.0, 0.0, 0.0], strict=True)
    ]


def test_rewards_see_what_they_see_in_training(tmp_path: Path) -> None:
    seen: list[Sample] = []

    def spy(samples: Sequence[Sample]) -> list[float]:
        seen.extend(samples)
        return [float(len(sample.token_ids)) for sample in samples]

    assert [line["reward"] for line in run(tmp_path / "out.jsonl", reward=spy)] == [1.0, 2.0, 3.0]
    last = seen[2]
    assert (last.prompt.index, last.sample_index, last.finish_reason, last.text) == (5, 2, "length", "402")
    assert (last.prompt.token_ids.tolist(), last.prompt.text, last.prompt.answer) == ([1, 2], "17+25=", "42")
    assert last.prompt.metadata["answer"] == "so #### 42"


def test_parts_are_written_and_what_cannot_be_scored_is_null(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unsure(samples: Sequence[Sample]) -> list[float | None]:
        return [None if sample.text == "41" else 2.0 for sample in samples]

    lines = run(tmp_path / "out.jsonl", reward=WeightedSum(right=exact_match, sure=(unsure, 0.5)))
    assert [line["reward"] for line in lines] == [2.0, None, 1.0]
    assert lines[1]["reward_parts"] == {"right": 0.0, "sure": None}
    assert "1 lines of the given rows could not be scored" in caplog.text


def test_an_interrupted_file_is_continued_and_refused_to_other_rewards_rows_and_arguments(tmp_path: Path) -> None:
    output, left = tmp_path / "out.jsonl", [2]

    def breaks(samples: Sequence[Sample]) -> list[float]:
        left[0] -= 1
        if left[0] < 0:
            raise ConnectionError("the server went away")
        return exact_match(samples)

    with pytest.raises(ConnectionError):
        run(output, reward=breaks, batch_size=1)
    assert [line["reward"] for line in read_lines(output)] == [1.0, 0.0]
    others: list[tuple[dict[str, object], str]] = [
        ({}, "reward: 'breaks' there, 'exact_match' now"),
        ({"reward": breaks, "subset": "main"}, r"rows: \['train', None\] there, \['train', 'main'\] now"),
        ({"reward": breaks, "answer_extractor": str}, "answer_extractor: 'final_answer' there, 'str' now"),
    ]
    for arguments, message in others:
        with pytest.raises(ValueError, match=message):
            run(output, **arguments)
    left[0] = 1
    assert [line["reward"] for line in run(output, reward=breaks, batch_size=1)] == [1.0, 0.0, 0.0]
    for _ in range(2):  # the same arguments are no other reward
        run(tmp_path / "digits.jsonl", reward=FormatReward("[0-9]+"))
    with pytest.raises(ValueError, match=r"reward_arguments: .*pattern.* now"):
        run(tmp_path / "digits.jsonl", reward=FormatReward("[a-z]+"))


def test_the_command_line_takes_functions_and_classes(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    words = [str(data), "--prompt", "question", "--answer", "answer", "--progress", "false"]
    main(["score", *words[:1], str(tmp_path / "a.jsonl"), "--reward", "rlhfkit.rewards.exact_match", *words[1:]])
    form = ["--reward", "rlhfkit.rewards.FormatReward", "--reward.pattern", "4."]
    main(["score", *words[:1], str(tmp_path / "b.jsonl"), *form, *words[1:]])
    rewards = [[line["reward"] for line in read_lines(tmp_path / name)] for name in ("a.jsonl", "b.jsonl")]
    assert rewards == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]


def test_a_reward_model_reads_the_sampled_tokens(tmp_path: Path) -> None:
    folder = str(tmp_path / "reward")
    load_scalar_model(str(tiny_model(tmp_path / "policy")), head_std=1.0).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    given = tokenized("2", "11")
    prompt = {"prompt": "1+1=", "prompt_ids": given[0].prompt.token_ids.tolist()}
    lines = [prompt | {"completion": one.text, "completion_ids": one.token_ids.tolist()} for one in given]
    output = score(lines, tmp_path / "out.jsonl", reward_model=folder, progress=False)
    expected = ModelReward(folder, device="cpu")(given)
    assert [line["reward"] for line in read_lines(output)] == pytest.approx(expected, abs=1e-5)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="completion='response' is not a column of the given rows"):
        run(tmp_path / "out.jsonl", completion="response")
    with pytest.raises(ValueError, match="either a reward or a reward_model, got None and None"):
        run(tmp_path / "out.jsonl", reward=None)
