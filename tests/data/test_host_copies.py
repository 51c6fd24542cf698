"""What the host knows of tensors on another device; the meta device stands for a GPU, as no values are read there."""

import gc
import weakref

import torch

from rlhfkit.data.batch import TokenExample, collate_tokens, host_copy, on_both, remember_host_copy


def moved(source: torch.Tensor) -> torch.Tensor:
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
