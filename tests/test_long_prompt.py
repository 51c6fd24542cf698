"""A row over two ranks, whole: the tutorial makes the same updates as on one rank, with half of the tokens on each."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks

TUTORIALS = Path(__file__).parent.parent / "tutorials"
WORDS = ("--tokens", "200", "--steps", "12")


def train(folder: Path, words: list[str]) -> dict[str, Any]:
    """What the tutorial finds, on one rank or on each of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TUTORIALS))
        return importlib.import_module("long_prompt").main(["--folder", str(folder), *words])


@pytest.mark.distributed
def test_two_ranks_compute_half_of_the_tokens_each_and_make_the_same_updates(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        alone = train(tmp_path, [*WORDS, "--sequence-ranks", "1"])
    finally:
        torch.set_num_threads(threads)
    words = [*WORDS, "--sequence-ranks", "2"]
    first, second = ranks.run("test_long_prompt:train", 2, tmp_path, words=words)
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert first["held_out"] == pytest.approx(alone["held_out"], abs=1e-4)
    assert alone["losses"][0] > alone["losses"][-1] + 1
    (whole,) = alone["ranks"]
    for part in first["ranks"]:
        # More than half: only rows of the same rank have their common leading dots computed once.
        assert 0.5 * whole["tokens"] <= part["tokens"] < 0.57 * whole["tokens"]
        assert part["bytes"] < 0.6 * whole["bytes"]
