"""Properties of supervised batches."""

import pytest
import torch

from rlhfkit.data import TokenExample, collate_tokens
from rlhfkit.data.batch import StepTotals

EXAMPLES = [TokenExample([5, 6, 7], [True, False, True]), TokenExample([8, 9], [False, True])]


def test_mask_is_on_the_next_token_axis_and_the_first_token_is_never_learned() -> None:
    batch = collate_tokens(EXAMPLES)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert torch.where(batch.loss_mask, batch.input_ids[:, 1:], -1).tolist() == [[-1, 7], [9, -1]]
    assert [example.targets for example in EXAMPLES] == batch.loss_mask.sum(-1).tolist()
    assert batch.token_denominator is None


def test_totals_travel_with_the_batch() -> None:
    batch = collate_tokens(EXAMPLES, StepTotals(tokens=40.0, sequences=10.0, micro_batches=4))
    assert batch.token_denominator == 10.0
    assert batch.sequence_denominator == 2.5
    assert batch.to("cpu").select([1]).token_denominator == 10.0


def test_without_targets_keeps_the_sequences() -> None:
    batch = collate_tokens(EXAMPLES, StepTotals(40.0, 10.0, 4))
    empty = batch.without_targets()
    assert not empty.loss_mask.any()
    assert torch.equal(empty.input_ids, batch.input_ids)
    assert empty.step_tokens == 40.0
    assert batch.loss_mask.any()


def test_a_placeholder_is_two_tokens_with_the_fields_of_any_batch() -> None:
    batch = collate_tokens([TokenExample([1, 2, 3], [False, True, True])], StepTotals(2.0, 1.0, 4))
    for blank in (batch.placeholder(), batch.select([]).placeholder()):
        assert blank.input_ids.tolist() == [[0, 0]]
        assert blank.attention_mask.tolist() == [[True, True]]
        assert blank.loss_mask.tolist() == [[False]]
        assert blank.step_micro_batches == 4
    assert batch.first_tokens(2).input_ids.tolist() == [[1, 2]]
    assert batch.first_tokens(2).loss_mask.tolist() == [[True]]
    assert batch.first_tokens(9).input_ids.tolist() == [[1, 2, 3]]


def test_bad_examples_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 tokens and a mask of 1"):
        TokenExample([1, 2], [True])
    with pytest.raises(ValueError, match="at least one token"):
        TokenExample([], [])
    with pytest.raises(ValueError, match="at least one example, got none"):
        collate_tokens([])
