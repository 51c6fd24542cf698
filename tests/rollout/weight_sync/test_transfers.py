"""Which way weights take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfkit import VLLMPool
from rlhfkit.rollout.weight_sync.coordinator import make_sender
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender, without_expandable_segments
from rlhfkit.rollout.weight_sync.process_group.groups import NcclGroup
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender


@pytest.mark.parametrize(
    ("arguments", "device", "expected"),
    [
        ({}, "cpu", "gloo"),
        ({}, "cuda", "nccl"),
        ({"colocate": True}, "cpu", "gloo"),
        ({"colocate": True}, "cuda", "ipc"),
        ({"transfer": "gloo"}, "cuda", "gloo"),
        ({"transfer": "gloo", "colocate": True}, "cuda", "gloo"),
        ({"transfer": "ipc", "colocate": True}, "cuda", "ipc"),
    ],
)
def test_auto_is_what_the_devices_allow_and_anything_else_is_taken_as_it_is(
    arguments: dict[str, Any], device: str, expected: str
) -> None:
    assert VLLMPool(**arguments).resolve_transfer(device) == expected


def test_a_device_that_was_not_known_then_is_refused_when_it_is() -> None:
    pool = VLLMPool(transfer="nccl")
    with pytest.raises(ValueError, match="the engines are on CPUs"):
        pool.resolve_transfer("cpu")


def test_each_transfer_has_its_sender_and_our_own_is_one_class_that_can_recover() -> None:
    senders = [make_sender(kind, timeout=7.0, bucket_bytes=11) for kind in ("gloo", "nccl", "ipc")]
    assert [type(sender) for sender in senders] == [ProcessGroupSender, ProcessGroupSender, IPCSender]
    assert [sender.recoverable for sender in senders] == [True, True, False]
    assert [sender.bucket_bytes for sender in senders] == [11] * 3
    assert [sender.group_backend for sender in senders[:2]] == ["gloo", "nccl"]


def test_memory_for_handles_is_taken_without_expandable_segments_and_the_settings_stay() -> None:
    allocator: Any = torch._C
    read, write = allocator._accelerator_getAllocatorSettings, allocator._accelerator_setAllocatorSettings
    before, chosen = read(), "max_split_size_mb:512,expandable_segments:True"
    try:
        write(chosen)
        with without_expandable_segments():
            assert read() == "expandable_segments:False"
        assert read() == chosen
        write("max_split_size_mb:512")
        with without_expandable_segments():
            assert read() == "max_split_size_mb:512"
    finally:
        write(before)


def test_a_group_of_nccl_has_the_error_that_torch_knows_and_none_if_torch_cannot_say() -> None:
    group = object.__new__(NcclGroup)
    for said, error in (("SUCCESS", None), ("REMOTE", "REMOTE")):
        group._group = SimpleNamespace(get_error=lambda said=said: SimpleNamespace(name=said))
        assert group.error == error
    group._group = SimpleNamespace()
    assert group.error is None
    group._group = None
    assert group.error == "the group for the weight transfer was closed"
