"""Rows are kept without padding and come back as they were."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhfkit.data.jagged import JaggedRows
from rlhfkit.data.types import Experience


def experience_of(lengths: list[int], seed: int, **fields: torch.Tensor) -> Experience:
    """Random values on real tokens; padding is what the fields say."""
    generator = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths), max(lengths)
    real = torch.arange(longest) < torch.tensor(lengths)[:, None]
    steps = real[:, 1:]

    def whole(low: int, high: int, mask: torch.Tensor, fill: int = 0) -> torch.Tensor:
        return torch.where(mask, torch.randint(low, high, mask.shape, generator=generator), fill)

    def normal() -> torch.Tensor:
        return torch.where(steps, torch.randn(steps.shape, generator=generator), 0.0)

    return Experience(
        input_ids=whole(0, 150_000, real),
        attention_mask=real,
        action_mask=whole(0, 2, steps).bool(),
        rollout_logprobs=normal(),
        versions=whole(0, 9, steps, fill=-1),
        rewards=torch.randn(batch, generator=generator),
        group=torch.randint(0, 3, (batch,), generator=generator),
        sample_index=torch.arange(batch),
        truncated=torch.zeros(batch, dtype=torch.bool),
        update=torch.zeros(batch, dtype=torch.int64),
        advantages=normal(),
        reward_parts={"format": torch.randn(batch, generator=generator)},
        rows=torch.arange(batch) * 3,
        **fields,
    )


def assert_equal(found: Experience, expected: Experience) -> None:
    """Same values, types and shapes."""
    for name, value in expected.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert getattr(found, name).dtype == value.dtype, name
            assert torch.equal(getattr(found, name), value), name
        elif isinstance(value, dict):
            assert all(torch.equal(getattr(found, name)[key], column) for key, column in value.items())
        else:
            assert getattr(found, name) == value, name


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99), st.data())
def test_selected_rows_equal_those_of_the_padded_batch(lengths: list[int], seed: int, data: st.DataObject) -> None:
    batch = experience_of(lengths, seed)
    kept = JaggedRows(batch)
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))
    assert len(kept) == len(batch)
    assert_equal(kept.select(chosen), batch.select(chosen))
    assert_equal(kept.padded(), batch)


def test_columns_of_several_numbers_a_token_are_kept_and_padded() -> None:
    lengths = [3, 1, 5]
    routing = torch.randint(1, 9, (3, 4, 6), dtype=torch.int16)
    routing[torch.arange(4) >= torch.tensor(lengths)[:, None] - 1] = 0
    whole = experience_of(lengths, 0).with_columns(routing=routing)
    assert_equal(JaggedRows(whole).select([2, 0]), whole.select([2, 0]))
    assert whole.placeholder().columns["routing"].tolist() == [[[0] * 6]]


def test_padding_is_the_fill_whatever_it_was() -> None:
    batch = experience_of([2, 4], 0)
    odd = dataclasses.replace(batch, advantages=torch.ones(2, 1).expand(2, 3), versions=batch.versions.clamp(min=7))
    found = JaggedRows(odd).select([0, 1])
    assert found.advantages is not None
    assert found.advantages.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert found.versions[0].tolist() == [odd.versions[0, 0], -1, -1]


def test_real_tokens_of_an_iteration_take_21_bytes_and_padding_none() -> None:
    rows = JaggedRows(experience_of([1000, *[10] * 90], 0))
    held = sum(column.rows[0].untyped_storage().nbytes() for column in rows._columns.values())
    # input ids 4, action mask 1, rollout log-probs 4, versions 8, advantages 4; the first token has no step.
    assert held == 21 * 1900 - 17 * 91


def test_padding_between_real_tokens_is_an_error() -> None:
    batch = experience_of([3, 4], 0)
    batch.attention_mask = torch.tensor([[False, True, True, True], [True] * 4])
    with pytest.raises(ValueError, match="padding before or between real tokens"):
        JaggedRows(batch)
