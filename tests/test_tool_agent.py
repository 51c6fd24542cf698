"""Training on episodes, whole: an agent learns to use a tool by GRPO."""

import importlib
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).parent.parent / "tutorials"


@pytest.mark.long
def test_a_random_model_learns_to_ask_a_tool_and_to_say_what_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a point for asking, a quarter for a digit, three quarters for the right one of ten."""
    monkeypatch.syspath_prepend(str(TUTORIALS))
    threads = torch.get_num_threads()
    try:
        found = importlib.import_module("tool_agent").main(["--folder", str(tmp_path), "--iterations", "35"])
    finally:
        torch.set_num_threads(threads)
    assert found["asks"] > 0.9
    assert found["first_reward"] < 0.2
    # Without reading the tool's result 0.5 + 0.25 + 0.75 / 10 = 0.825 is the best there is.
    assert found["reward"] > 1.1
