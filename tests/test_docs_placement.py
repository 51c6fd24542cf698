"""The estimates of docs/placement.md are those of the code."""

import importlib.util
from pathlib import Path

GENERATOR = Path(__file__).parents[1] / "docs" / "generate_placement.py"


def test_the_page_has_the_estimates_of_the_code() -> None:
    specification = importlib.util.spec_from_file_location("generate_placement", GENERATOR)
    assert specification is not None
    assert specification.loader is not None
    generator = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generator)
    text = generator.PAGE.read_text(encoding="utf-8")
    assert text == generator.page(text), "run python docs/generate_placement.py"
    for name, splits in generator.SPLITS.items():
        gpus = {generator.run_of(name, recipe).gpus for recipe in ("colocate all", *splits, "async")}
        assert len(gpus) == 1, "every recipe has as many GPUs"
