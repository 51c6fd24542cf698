"""Folders of tiny models, written when they are first asked for."""

from pathlib import Path

import pytest
from tiny_models import tiny_model

from models.families import FAMILIES


class Folders(dict[str, str]):
    """By Transformers' name of a family or, where that has several, as people call it."""

    def __init__(self, place: Path) -> None:
        super().__init__()
        self.place = place

    def __missing__(self, name: str) -> str:
        family = next(one for one in FAMILIES if name in (one.name, one.model_type))
        self[name] = str(family.save(self.place / str(len(self))))
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the tiny Llama of most tests."""
    return str(tiny_model(tmp_path_factory.mktemp("model")))
