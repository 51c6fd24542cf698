"""What a body holds is counted before it is parsed, as a parser would count it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.serving.middleware import JSONTooLarge, check_json_size

TEXTS = st.text(st.sampled_from('a"\\,[]{}:\n\u00e9\U0001f600'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def objects(value: Any) -> int:
    """Texts, lists and objects."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(objects, value.values()))
    return 1 + sum(map(objects, value)) if isinstance(value, list) else int(isinstance(value, str))


def commas(value: Any) -> int:
    """Commas between values."""
    parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
    return max(len(parts) - 1, 0) + sum(map(commas, parts))


def depth(value: Any) -> int:
    parts = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else None
    return 0 if parts is None else 1 + max(map(depth, parts), default=0)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
@settings(max_examples=200, deadline=None)
def test_what_is_counted_is_in_the_parsed_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    found = {"max_objects": objects(value), "max_numbers": commas(value), "max_depth": depth(value)}
    check_json_size(body, **found)
    for name, count in found.items():
        if count:
            with pytest.raises(JSONTooLarge, match=f"more than {count - 1} " if name == "max_depth" else "holds more"):
                check_json_size(body, **(found | {name: count - 1}))


@pytest.mark.parametrize("body", [b'"abc', b'["a", "b]', b'"a\\"', b'"' + b'\\"' * 100_000])
def test_a_text_that_does_not_end_is_refused_at_once(body: bytes) -> None:
    with pytest.raises(ValueError, match="does not end"):
        check_json_size(body, max_objects=1000, max_numbers=1000)
