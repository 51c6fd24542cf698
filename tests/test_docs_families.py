import importlib.util
from pathlib import Path

GENERATOR = Path(__file__).parents[1] / "docs" / "generate_families.py"
SPECIFICATION = importlib.util.spec_from_file_location("generate_families", GENERATOR)
assert SPECIFICATION is not None
assert SPECIFICATION.loader is not None
generate_families = importlib.util.module_from_spec(SPECIFICATION)
SPECIFICATION.loader.exec_module(generate_families)


def test_page_is_what_the_tests_of_families_assert():
    stale = "docs/reference/model_families.md is stale: run python docs/generate_families.py"
    assert generate_families.PAGE.read_text(encoding="utf-8") == generate_families.render(), stale


def test_every_family_has_a_name_of_its_own():
    names = [family.name for family in generate_families.families()]
    assert len(names) == len(set(names)) >= 45
