"""Rows are kept without padding and come back as they were."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.examples import assert_same, random_samples, sample, with_columns
from rlhfkit.data.jagged import JaggedRows
from rlhfkit.data.types import Experience


def experience_of(*lengths: int) -> Experience:
    """Rows of these lengths, as a module has prepared them."""
    batch = Experience.from_samples([sample(0, 1, length - 1) for length in lengths])
    return dataclasses.replace(batch, advantages=torch.ones(batch.action_mask.shape) * batch.attention_mask[:, 1:])


@given(st.integers(1, 6), st.integers(0, 99), st.data())
def test_selected_rows_equal_those_of_the_padded_batch(count: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = with_columns(Experience.from_samples(random_samples(count, generator)), generator)
    batch.rows = torch.arange(count) * 3
    kept = JaggedRows(batch)
    chosen = data.draw(st.lists(st.integers(0, count - 1), max_size=5))
    assert len(kept) == len(batch)
    assert_same(kept.select(chosen), batch.select(chosen))
    assert_same(kept.padded(), batch)
    assert batch.placeholder().columns["routing"].tolist() == [[[0] * 3]]


def test_padding_is_the_fill_whatever_it_was() -> None:
    batch = experience_of(2, 4)
    odd = dataclasses.replace(batch, advantages=torch.ones(2, 1).expand(2, 3), versions=batch.versions.clamp(min=7))
    found = JaggedRows(odd).select([0, 1])
    assert found.advantages is not None
    assert found.advantages.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert found.versions.tolist() == [[7, -1, -1], [7, 7, 7]]


def test_real_tokens_of_an_iteration_take_21_bytes_and_padding_none() -> None:
    rows = JaggedRows(experience_of(1000, *[10] * 90))
    held = sum(column.rows[0].untyped_storage().nbytes() for column in rows._columns.values())
    # input ids 4, action mask 1, rollout log-probs 4, versions 8, advantages 4; the first token has no step.
    assert held == 21 * 1900 - 17 * 91


def test_padding_between_real_tokens_is_an_error() -> None:
    batch = experience_of(3, 4)
    batch.attention_mask = torch.tensor([[False, True, True, True], [True] * 4])
    with pytest.raises(ValueError, match="padding before or between real tokens"):
        JaggedRows(batch)
