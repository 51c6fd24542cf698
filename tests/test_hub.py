"""Models of the hub without a network; data sets are in ``datamodules/tokenization/test_sources.py``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rlhfkit.hub import check_hub_model
from rlhfkit.models import load_causal_lm
from rlhfkit.models.load import load_config, load_tokenizer

NOBODY = "http://127.0.0.1:9"
"""An address at which nothing answers."""


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that does not answer."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_causal_lm])
def test_a_model_that_is_nowhere_is_an_error_within_seconds(load: Callable[[str], Any], naps: list[float]) -> None:
    with pytest.raises(ConnectionError, match=f"(?s)nobody/nothing is no folder.*{NOBODY} cannot be re.*give a folder"):
        load("nobody/nothing")
    assert sum(naps) < 5


def test_a_hub_that_must_not_be_asked_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.utils.http_backoff", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE forbids"):
        check_hub_model("nobody/nothing")


def test_what_is_in_the_cache_or_cannot_be_on_the_hub_is_left_to_transformers(
    no_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils.http_backoff", lambda *_, **__: pytest.fail("the hub was asked"))
    for number, file in enumerate(("config.json", "adapter_config.json", "tokenizer_config.json")):
        saved = no_hub / f"models--nobody--something{number}"
        (saved / "refs").mkdir(parents=True)
        (saved / "refs/main").write_text("1234")
        (saved / "snapshots/1234").mkdir(parents=True)
        (saved / "snapshots/1234" / file).write_text("{}")
        check_hub_model(f"nobody/something{number}")
    monkeypatch.chdir(no_hub)
    (no_hub / "model").mkdir()
    check_hub_model("model")
    check_hub_model("not a name")
