"""What is stored per token reads as it was set, in few bytes. Covers token_arrays.py and the records of types.py."""

import copy
import dataclasses
import json
import math
import pickle
import sys
from array import array
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.data.token_arrays import Runs, stored

INTEGERS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.floats(allow_nan=False) | st.floats(allow_nan=False, width=32)


@st.composite
def token_fields(draw: st.DrawFn) -> dict[str, Any]:
    """Lists of one length for all fields per token."""
    length = draw(st.integers(0, 12))

    def lists(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    return {
        "token_ids": lists(draw(st.sampled_from([st.integers(0, 200_000), INTEGERS]))),
        "logprobs": lists(draw(st.sampled_from([NUMBERS, st.just(-0.5)]))),
        "versions": lists(draw(st.sampled_from([st.integers(0, 1), INTEGERS]))),
        "action_mask": draw(st.none() | st.just(lists(st.booleans()))),
        "token_rewards": draw(st.none() | st.just(lists(NUMBERS))),
    }


@settings(deadline=None, max_examples=200)
@given(token_fields())
def test_lists_read_as_they_were_set(lists: dict[str, Any]) -> None:
    sample = Sample(Prompt(3, lists["token_ids"]), 1, **lists, finish_reason="stop", text="so")
    for made in (sample, pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample), dataclasses.replace(sample)):
        assert made.prompt.token_ids == lists["token_ids"]
        assert {name: getattr(made, name) for name in lists} == lists
        assert {name: type(value) for name, value in vars_of(made).items()} == {n: type(v) for n, v in lists.items()}
        assert made == sample
        assert repr(made) == repr(sample)
    assert repr(lists["logprobs"]) in repr(sample)
    assert sample.num_tokens == len(lists["token_ids"])
    assert [version for version, count in sample.version_runs for _ in range(count)] == lists["versions"]
    assert sample.num_action_tokens == sum(lists["action_mask"] or [True] * sample.num_tokens)
    if lists["action_mask"] == []:
        assert sample.num_action_tokens == 0


def vars_of(sample: Sample) -> dict[str, Any]:
    names = ("token_ids", "logprobs", "versions", "action_mask", "token_rewards")
    return {name: getattr(sample, name) for name in names}


ARRAYS = [
    lambda values, kind: numpy.array(values, dtype=kind),
    lambda values, kind: torch.tensor(values, dtype=getattr(torch, kind)),
    lambda values, kind: array({"int32": "i", "int64": "q", "float32": "f", "float64": "d"}[kind], values),
]


@pytest.mark.parametrize("make", ARRAYS, ids=["numpy", "torch", "array"])
@pytest.mark.parametrize(("integers", "floats"), [("int32", "float32"), ("int64", "float64")])
def test_arrays_of_any_kind_are_stored_as_lists_are(make: Any, integers: str, floats: str) -> None:
    numbers = [-0.5, math.inf, 0.1] if floats == "float64" else [-0.5, 1e-40, -3.0]
    numbers = make(numbers, floats).tolist()
    ids = [5, 2**31 if integers == "int64" else 7, 0]
    runs = [(4, 2), (4, 0), (5, 1)]
    given = Sample.from_arrays(
        Prompt(1, [1]),
        0,
        token_ids=make(ids, integers),
        logprobs=make(numbers, floats),
        version_runs=runs,
        finish_reason="length",
        token_rewards=make(numbers, floats),
        action_mask=make([1, 0, 1], integers),
        text="so",
    )
    expected = Sample(
        Prompt(1, [1]), 0, ids, numbers, [4, 4, 5], "length", [True, False, True], "so", token_rewards=numbers
    )
    assert given == expected
    assert given.version_runs == [(4, 2), (5, 1)]
    for name in vars_of(given):
        assert stored(given, name) == stored(expected, name)  # of one type: smaller than what was given where it can be
    versions = dataclasses.replace(given, versions=make([9, 9, 3], integers))
    assert versions.versions == [9, 9, 3]


def test_arrays_that_may_not_be_written_are_taken_and_later_changes_do_not_reach_the_sample() -> None:
    ids = numpy.array([3, 4], dtype=numpy.int32)
    fixed = numpy.array([-0.5, -1.5], dtype=numpy.float32)
    fixed.flags.writeable = False
    sample = Sample.from_arrays(
        Prompt(1, [1]), 0, token_ids=ids, logprobs=fixed, version_runs=[(0, 2)], finish_reason="stop"
    )
    ids[0] = 9
    assert sample.token_ids == [3, 4]
    assert sample.logprobs == [-0.5, -1.5]


def test_a_list_that_was_read_is_a_copy() -> None:
    sample = Sample(Prompt(1, [1, 2]), 0, [3, 4], [-0.5, -1.5], [0, 0], "stop")
    for read in (sample.token_ids, sample.logprobs, sample.versions, sample.prompt.token_ids):
        read.append(9)
    assert sample == Sample(Prompt(1, [1, 2]), 0, [3, 4], [-0.5, -1.5], [0, 0], "stop")
    sample.token_ids = [7, 8]
    assert sample.token_ids == [7, 8]


def test_copies_share_arrays() -> None:
    sample = Sample(Prompt(1, [1]), 0, [3], [-0.5], [0], "stop")
    assert stored(copy.copy(sample), "token_ids") is stored(sample, "token_ids")


def test_numbers_of_float32_stay_float32_and_others_exact() -> None:
    exact = torch.rand(100).log().tolist()
    assert stored(Sample(Prompt(1, [1]), 0, [1] * 100, exact, [0] * 100, "stop"), "logprobs").typecode == "f"
    unknown = Sample(Prompt(1, [1]), 0, [1, 1], [math.nan, math.nan], [0, 0], "stop")
    assert stored(unknown, "logprobs").typecode == "f"
    assert all(map(math.isnan, unknown.logprobs))
    assert Sample(Prompt(1, [1]), 0, [1], [-0.1], [0], "stop").logprobs == [-0.1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ["a"]}, "Sample.token_ids: .*integer"),
        ({"token_ids": torch.tensor([0.5])}, "Sample.token_ids: whole numbers are wanted, got torch.float32"),
        ({"logprobs": [None]}, "Sample.logprobs: must be real number"),
        ({"logprobs": torch.zeros(1, 1)}, r"Sample.logprobs: one number per token is wanted, got shape \(1, 1\)"),
        ({"token_ids": [2**64]}, "Sample.token_ids"),
    ],
)
def test_what_is_no_number_per_token_is_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"token_ids": [1], "logprobs": [0.0], "versions": [0]}
    with pytest.raises((TypeError, ValueError, OverflowError), match=message):
        Sample(Prompt(1, [1]), 0, **(fields | changes), finish_reason="stop")


def test_runs_must_cover_the_tokens_and_have_lengths() -> None:
    with pytest.raises(ValueError, match=r"one length, got .*'versions': 3"):
        Sample.from_arrays(
            Prompt(1, [1]), 0, token_ids=[1], logprobs=[0.0], version_runs=[(0, 3)], finish_reason="stop"
        )
    with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
        Runs.of([(0, -1)])


def resident_bytes(sample: Sample) -> int:
    """Bytes of a sample, its fields' arrays included, its prompt not."""
    total = sys.getsizeof(sample)
    for field in dataclasses.fields(sample):
        held = stored(sample, field.name)
        if isinstance(held, Runs):
            total += sys.getsizeof(held) + sys.getsizeof(held.values) + sys.getsizeof(held.lengths)
        elif field.name not in ("prompt", "text"):
            total += sys.getsizeof(held)
    return total


def test_a_sample_takes_less_than_20_bytes_a_token() -> None:
    length = 2048
    logprobs = torch.rand(length).log().tolist()
    sample = Sample(
        Prompt(1, [1]),
        0,
        token_ids=list(range(100_000, 100_000 + length)),
        logprobs=logprobs,
        versions=[3] * 1000 + [4] * (length - 1000),
        finish_reason="stop",
        action_mask=[place % 9 > 0 for place in range(length)],
        token_rewards=[0.1 * (place == 7) for place in range(length)],  # 0.1 is not a number of float32
    )
    assert resident_bytes(sample) <= 20 * length
    plain = dataclasses.replace(sample, action_mask=None, token_rewards=None)
    assert resident_bytes(plain) <= 9 * length
    assert len(pickle.dumps(sample)) <= 20 * length


def reference(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The same batch, token by token."""
    length = max(len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples)
    shape = len(samples), length
    made = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "action_mask": torch.zeros(len(samples), length - 1, dtype=torch.bool),
        "rollout_logprobs": torch.zeros(len(samples), length - 1, dtype=torch.float32),
        "versions": torch.full((len(samples), length - 1), -1, dtype=torch.int64),
        "token_rewards": torch.zeros(len(samples), length - 1, dtype=torch.float32),
    }
    for row, sample in enumerate(samples):
        begin = len(sample.prompt.token_ids)
        for place, token in enumerate(sample.prompt.token_ids + sample.token_ids):
            made["input_ids"][row, place] = token
            made["attention_mask"][row, place] = True
        for place in range(len(sample.token_ids)):
            if sample.action_mask is None or sample.action_mask[place]:
                made["action_mask"][row, begin - 1 + place] = sample.reward is not None
                made["rollout_logprobs"][row, begin - 1 + place] = sample.logprobs[place]
                made["versions"][row, begin - 1 + place] = sample.versions[place]
            if sample.token_rewards is not None:
                made["token_rewards"][row, begin - 1 + place] = sample.token_rewards[place]
    return made


FLOAT32 = st.floats(width=32)
PROMPTS = st.lists(INTEGERS, min_size=1, max_size=4)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(PROMPTS, token_fields(), st.none() | FLOAT32), min_size=1, max_size=4))
def test_samples_stack_as_token_by_token(rows: list[tuple[list[int], dict[str, Any], float | None]]) -> None:
    samples = []
    for index, (prompt, lists, reward) in enumerate(rows):
        for name in ("logprobs", "token_rewards"):
            if lists[name] is not None:  # beyond float32 there is no such tensor
                lists[name] = torch.tensor(lists[name], dtype=torch.float64).clamp(-1e38, 1e38).tolist()
        samples.append(Sample(Prompt(index, prompt), 0, **lists, finish_reason="stop", reward=reward))
    batch = Experience.from_samples(samples)
    for name, expected in reference(samples).items():
        found = getattr(batch, name)
        if found is None:
            assert all(sample.token_rewards is None for sample in samples)
            continue
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=name)


def test_fields_are_written_as_json() -> None:
    sample = Sample(Prompt(1, [1, 2]), 0, [3], [-0.5], [4], "stop", [True])
    plain = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample) if field.name != "prompt"}
    assert Sample(sample.prompt, **json.loads(json.dumps(plain))) == sample
