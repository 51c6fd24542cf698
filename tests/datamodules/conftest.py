"""Small real files, and a cache of ``datasets`` that goes away with the test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lazy_module import LazyModule

datasets = LazyModule("datasets")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what ``datasets`` writes out of the user's home."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write rows in a format, and give the path."""

    def write(rows: list[dict[str, Any]], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        table = datasets.Dataset.from_list(rows)
        if name.endswith(".jsonl"):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows))
        elif name.endswith(".csv"):
            table.to_csv(path)
        elif name.endswith(".tsv"):
            table.to_csv(path, sep="\t")
        elif name.endswith(".parquet"):
            table.to_parquet(path)
        else:
            table.save_to_disk(path)
        return str(path)

    return write
