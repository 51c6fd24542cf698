"""Properties of supervised batches, and what the host knows of those on another device."""

import gc
import weakref

import pytest
import torch

from rlhfkit.data.batch import StepTotals, TokenExample, collate_tokens, host_copy, on_both, remember_host_copy

EXAMPLES = [TokenExample([5, 6, 7], [True, False, True]), TokenExample([8, 9], [False, True])]


def test_mask_is_on_the_next_token_axis_and_the_first_token_is_never_learned() -> None:
    batch = collate_tokens(EXAMPLES)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, True, False]]
    assert torch.where(batch.loss_mask, batch.input_ids[:, 1:], -1).tolist() == [[-1, 7], [9, -1]]
    assert [example.targets for example in EXAMPLES] == batch.loss_mask.sum(-1).tolist()
    assert batch.token_denominator is None


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


# ---------------------------------------------------------------------- on another device


def moved(source: torch.Tensor) -> torch.Tensor:
    """On the meta device, which stands for a GPU, as no values are read there."""
    return remember_host_copy(source.to("meta"), source)


def test_a_batch_that_is_moved_is_known_on_the_host() -> None:
    batch = collate_tokens([TokenExample([1, 2, 3], [False, True, True]), TokenExample([4], [False])])
    there = batch.to("meta")
    assert host_copy(there.input_ids) is batch.input_ids
    assert host_copy(there.action_mask) is batch.loss_mask
    assert host_copy(batch.input_ids) is batch.input_ids


def test_a_tensor_that_was_changed_or_computed_is_not_known() -> None:
    source = torch.arange(4)
    for changed in ("there", "source"):
        there = moved(source)
        assert host_copy(there) is source
        (there if changed == "there" else source).add_(1)
        assert host_copy(there) is None
    assert host_copy(moved(source) + 1) is None
    with torch.inference_mode():  # such tensors do not know whether they were changed
        assert host_copy(moved(source)) is None


def test_what_is_computed_on_both_is_known_if_all_arguments_are() -> None:
    first, second = torch.arange(4), torch.ones(4)
    known = on_both(torch.add, moved(first), moved(second))
    copy = host_copy(known)
    assert copy is not None
    assert torch.equal(copy, first + second)
    assert host_copy(on_both(torch.add, moved(first), second.to("meta"))) is None
    assert torch.equal(on_both(torch.add, first, second), first + second)


def test_a_copy_is_kept_as_long_as_its_tensor() -> None:
    source = torch.arange(4)
    there, kept = moved(source), weakref.ref(source)
    del source
    gc.collect()
    assert kept() is host_copy(there) is not None
    del there
    gc.collect()
    assert kept() is None
