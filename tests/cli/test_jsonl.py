"""JSONLWriter: what a file holds after interruptions, and what it refuses; other settings: ``test_generate.py``."""

import json
import math
from pathlib import Path

import pytest

from rlhfkit.cli.jsonl import JSONLWriter

SETTINGS = {"model": "a", "sampling.stop": ("x",)}


def test_whatever_an_interruption_leaves_is_continued_without_loss_or_doubles(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    with JSONLWriter(path, SETTINGS, group=2) as writer:
        writer.write({"row": row} for row in range(6))
    whole = path.read_bytes()
    assert len(whole) == 66
    for size in range(67):
        path.write_bytes(whole[:size])  # killed in the middle of a write, anywhere
        with JSONLWriter(path, SETTINGS, group=2) as writer:
            assert writer.done == size // 22 * 2
            for row in range(writer.done, 6, 2):
                writer.write([{"row": row}, {"row": row + 1}])
        assert path.read_bytes() == whole


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(FileExistsError, match=r"out.jsonl exists and has no out.jsonl.settings.json"):
        JSONLWriter(path, SETTINGS)
    assert path.read_text() == "precious\n"


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with JSONLWriter(path, {}) as writer:
        writer.write([{"text": "é\u2028\n", "number": math.nan, "parts": {"a": math.inf, "b": [1.5, -math.inf]}}])
    (line,) = path.read_bytes().removesuffix(b"\n").split(b"\n")
    assert json.loads(line, parse_constant=pytest.fail) == {
        "text": "é\u2028\n",
        "number": None,
        "parts": {"a": None, "b": [1.5, None]},
    }


@pytest.mark.parametrize("garbage", ["nothing of ours\n", "[1, 2]\n", '{"row": 0\n'])
def test_lines_of_something_else_do_not_count_as_done(tmp_path: Path, garbage: str) -> None:
    path = tmp_path / "out.jsonl"
    with JSONLWriter(path, SETTINGS) as writer:
        writer.write([{"row": 0}])
    changed = garbage + path.read_text()
    path.write_text(changed)
    with pytest.raises(ValueError, match=r"line 1 of .*out.jsonl is no line of an output .*overwrite"):
        JSONLWriter(path, SETTINGS)
    assert path.read_text() == changed
