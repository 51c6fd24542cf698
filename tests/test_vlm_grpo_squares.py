"""Training with images, whole: a model that sees learns by reward, and its samples are shown with their pictures."""

import importlib
from pathlib import Path

import pytest
import torch

from rlhfkit.callbacks.report.page import read_page
from rlhfkit.data.images import Image

TUTORIALS = Path(__file__).parent.parent / "tutorials"


@pytest.mark.long
def test_a_model_learns_by_reward_to_answer_about_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TUTORIALS))
    threads, program = torch.get_num_threads(), importlib.import_module("vlm_grpo_squares")
    try:
        before, after = program.main(["--folder", str(tmp_path), "--iterations", "40"])
    finally:
        torch.set_num_threads(threads)
    assert after > before + 0.2
    path = tmp_path / "grpo" / "version_0" / "report.html"
    assert path.stat().st_size < 5e6
    for kept in read_page(path)[0].samples:
        for group in kept["groups"]:
            [picture] = group["images"]
            colours = {colour for _, colour in Image.of(picture, "a picture").open().getcolors()}
            asked, answer = group["prompt"].removeprefix("<image>"), group["answer"]
            if asked == "colour?":
                assert program.COLOURS[answer] in colours
