"""Numbers per token are small read-only arrays that equal what was set, and stack as token by token."""

import copy
import dataclasses
import json
import math
import pickle
from array import array
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data import Experience, Prompt, Sample, types
from rlhfkit.data.types import decode_texts

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


@given(token_fields())
def test_fields_read_as_they_were_set(lists: dict[str, Any]) -> None:
    sample = Sample(Prompt(3, lists["token_ids"]), 1, **lists, finish_reason="stop", text="so")
    plain = json.loads(json.dumps(sample.plain()))
    copies = [pickle.loads(pickle.dumps(sample)), copy.deepcopy(sample), dataclasses.replace(sample)]
    for made in (sample, *copies, Sample(**plain | {"prompt": Prompt(**plain["prompt"])})):
        assert made.prompt.token_ids.tolist() == lists["token_ids"]
        for name, values in lists.items():
            read = getattr(made, name)
            assert (None if read is None else read.tolist()) == values
            assert read is None or (not read.flags.writeable and read.dtype == getattr(sample, name).dtype)
        assert made == sample
        assert repr(made) == repr(sample)
    assert sample.num_tokens == len(lists["token_ids"])
    assert sample.all_token_ids.tolist() == lists["token_ids"] * 2
    assert [version for version, count in sample.version_runs for _ in range(count)] == lists["versions"]
    assert sample.num_action_tokens == sum(sample.chosen) == sum(lists["action_mask"] or [True] * sample.num_tokens)
    if lists["action_mask"] == []:
        assert sample.num_action_tokens == 0


ARRAYS = [
    lambda values, kind: numpy.array(values, dtype=kind),
    lambda values, kind: torch.tensor(values, dtype=getattr(torch, kind)),
    lambda values, kind: array({"int32": "i", "int64": "q", "float32": "f", "float64": "d"}[kind], values),
]


@pytest.mark.parametrize("make", ARRAYS, ids=["numpy", "torch", "array"])
@pytest.mark.parametrize(("integers", "floats"), [("int32", "float32"), ("int64", "float64")])
def test_arrays_of_any_kind_are_kept_as_lists_are(make: Any, integers: str, floats: str) -> None:
    numbers = [-0.5, math.inf, 0.1] if floats == "float64" else [-0.5, 1e-40, -3.0]
    numbers = make(numbers, floats).tolist()
    ids = [5, 2**31 if integers == "int64" else 7, 0]
    whole = {"token_ids": ids, "versions": [4, 4, 5], "action_mask": [1, 0, 1]}
    fields: dict[str, Any] = {name: (values, integers) for name, values in whole.items()}
    fields |= dict.fromkeys(("logprobs", "token_rewards"), (numbers, floats))
    given, expected = ({name: kind(*one) for name, one in fields.items()} for kind in (make, lambda values, _: values))
    found, wanted = (
        Sample(Prompt(1, each["token_ids"]), 0, **each, finish_reason="stop") for each in (given, expected)
    )
    assert found == wanted
    assert found.version_runs == [(4, 2), (5, 1)]
    for name in fields:  # smaller than what was given where it can be
        assert getattr(found, name).dtype == getattr(wanted, name).dtype


def test_later_changes_of_what_was_given_do_not_reach_the_sample() -> None:
    ids = numpy.array([3, 4], dtype=numpy.int32)
    many = numpy.array([-0.5, -1.5, 0.0], dtype=numpy.float32)
    fixed = many[:2]
    fixed.flags.writeable = False
    sample = Sample(Prompt(1, [1]), 0, ids, fixed, [0, 0], "stop")
    ids[0], many[0] = 9, 9.0
    assert sample.token_ids.tolist() == [3, 4]
    assert sample.logprobs.tolist() == [-0.5, -1.5]


def test_copies_of_a_record_share_its_arrays_until_others_are_set() -> None:
    sample = Sample(Prompt(1, [1, 2]), 0, [3, 4], [-0.5, -1.5], [0, 0], "stop")
    with pytest.raises(ValueError, match="read-only"):
        sample.token_ids[0] = 9
    assert dataclasses.replace(sample).token_ids is copy.copy(sample).token_ids is sample.token_ids
    sample.token_ids = [7, 8]
    assert sample.token_ids.tolist() == [7, 8]
    sample.token_ids = [7, 8, 9]
    with pytest.raises(ValueError, match=r"one length, got .*'token_ids': 3"):
        Experience.from_samples([sample])


def test_numbers_of_float32_stay_float32_and_others_exact() -> None:
    exact = torch.rand(100).log().tolist()
    assert Sample(Prompt(1, [1]), 0, [1] * 100, exact, [0] * 100, "stop").logprobs.dtype == numpy.float32
    unknown = Sample(Prompt(1, [1]), 0, [1, 1], [math.nan, math.nan], [0, 0], "stop")
    assert unknown.logprobs.dtype == numpy.float32
    assert numpy.isnan(unknown.logprobs).all()
    assert Sample(Prompt(1, [1]), 0, [1], [-0.1], [0], "stop").logprobs.tolist() == [-0.1]
    half = Sample(Prompt(1, [1]), 0, [1], torch.tensor([-0.1], dtype=torch.bfloat16), [0], "stop")
    assert half.logprobs.dtype == numpy.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ["a"]}, "Sample.token_ids: whole numbers are wanted, got <U1"),
        ({"token_ids": torch.tensor([0.5])}, "Sample.token_ids: whole numbers are wanted, got float32"),
        ({"logprobs": [None]}, "Sample.logprobs: numbers are wanted, got object"),
        ({"logprobs": torch.zeros(1, 1)}, r"Sample.logprobs: one number per token is wanted, got shape \(1, 1\)"),
        ({"token_ids": [2**64]}, "Sample.token_ids"),
        ({"versions": [0, 0, 0]}, r"one length, got .*'versions': 3"),
    ],
)
def test_what_is_no_number_per_token_is_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"token_ids": [1], "logprobs": [0.0], "versions": [0]}
    with pytest.raises((TypeError, ValueError), match=message):
        Sample(Prompt(1, [1]), 0, **(fields | changes), finish_reason="stop")


def test_a_sample_takes_less_than_20_bytes_a_token_and_a_plain_one_13() -> None:
    """In a pickle, in which lists would take more too."""
    length = 2048
    ids, versions = list(range(100_000, 100_000 + length)), [3] * 1000 + [4] * (length - 1000)
    plain = Sample(Prompt(1, [1]), 0, ids, torch.rand(length).log().tolist(), versions, "stop")
    more = {"action_mask": [place % 9 > 0 for place in range(length)], "token_rewards": [0.5] * length}
    assert len(pickle.dumps(plain)) <= 13 * length
    assert len(pickle.dumps(dataclasses.replace(plain, **more))) <= 18 * length


def test_texts_are_those_of_the_tokens_and_many_are_decoded_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "DECODED_TOKENS", 3)
    calls: list[list[list[int]]] = []

    def decode(batch: list[list[int]]) -> list[str]:
        calls.append(batch)
        return [" ".join(map(str, token_ids)) for token_ids in batch]

    batch = [Sample(Prompt(1, [1]), index, [index, 7], [0.0] * 2, [0] * 2, "stop", text="old") for index in range(3)]
    decode_texts(batch, decode)
    assert [sample.text for sample in batch] == ["0 7", "1 7", "2 7"]
    assert calls == [[[0, 7], [1, 7]], [[2, 7]]]
    decode_texts([], decode)


FLOAT32 = st.floats(width=32)
PROMPTS = st.lists(INTEGERS, min_size=1, max_size=4)


@given(st.lists(st.tuples(PROMPTS, token_fields(), st.none() | FLOAT32), min_size=1, max_size=4))
def test_samples_stack_as_token_by_token(rows: list[tuple[list[int], dict[str, Any], float | None]]) -> None:
    samples = []
    for index, (prompt, lists, reward) in enumerate(rows):
        for name in ("logprobs", "token_rewards"):
            if lists[name] is not None:  # beyond float32 there is no such tensor
                lists[name] = torch.tensor(lists[name], dtype=torch.float64).clamp(-1e38, 1e38).tolist()
        samples.append(Sample(Prompt(index, prompt), 0, **lists, finish_reason="stop", reward=reward))
    batch = Experience.from_samples(samples)
    assert batch.action_mask.shape == (len(samples), batch.input_ids.shape[1] - 1)
    assert (batch.token_rewards is None) == all(sample.token_rewards is None for sample in samples)
    for row, sample in enumerate(samples):
        begin, end = sample.prompt.num_tokens, sample.prompt.num_tokens + sample.num_tokens
        steps, chosen = slice(begin - 1, end - 1), torch.tensor(sample.chosen)
        earned = torch.zeros(sample.num_tokens) if sample.token_rewards is None else torch.tensor(sample.token_rewards)
        expected = {
            "input_ids": (slice(end), torch.tensor(sample.all_token_ids)),
            "attention_mask": (slice(end), torch.ones(end, dtype=torch.bool)),
            "action_mask": (steps, chosen & (sample.reward is not None)),
            "rollout_logprobs": (steps, torch.where(chosen, torch.tensor(sample.logprobs).float(), 0.0)),
            "versions": (steps, torch.where(chosen, torch.tensor(sample.versions), -1)),
            "token_rewards": (steps, earned.float()),
        }
        for name, (places, values) in expected.items():
            found = getattr(batch, name)
            if found is not None:
                whole = torch.full_like(found[row], -1 if name == "versions" else 0)
                whole[places] = values.to(whole.dtype)
                torch.testing.assert_close(found[row], whole, rtol=0, atol=0, equal_nan=True, msg=name)
