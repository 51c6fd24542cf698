"""Which way weights take."""

import enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfkit import VLLMPool
from rlhfkit.rollout.weight_sync.coordinator import make_sender
from rlhfkit.rollout.weight_sync.cuda_ipc import IPCSender, without_expandable_segments
from rlhfkit.rollout.weight_sync.process_group.groups import NcclGroup
from rlhfkit.rollout.weight_sync.process_group.transfer import ProcessGroupSender


class Error(enum.Enum):
    """As torch's ``ErrorType``."""

    SUCCESS = 0
    REMOTE = 3


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


def test_each_transfer_has_its_sender_and_our_own_are_one_class_that_can_recover() -> None:
    senders = {kind: make_sender(kind, timeout=7.0, bucket_bytes=11) for kind in ("gloo", "nccl", "ipc")}
    kinds = {kind: type(sender) for kind, sender in senders.items()}
    assert kinds == {"gloo": ProcessGroupSender, "nccl": ProcessGroupSender, "ipc": IPCSender}
    assert [senders[kind].recoverable for kind in kinds] == [True, True, False]
    assert [senders[kind].backend for kind in kinds] == ["rlhfkit", "rlhfkit", "ipc"]
    assert [senders[kind].bucket_bytes for kind in kinds] == [11] * 3
    assert [senders[kind].timeout for kind in ("gloo", "nccl")] == [7.0] * 2
    assert [senders[kind].group_backend for kind in ("gloo", "nccl")] == ["gloo", "nccl"]


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


def test_a_group_of_nccl_without_its_error_state_has_none() -> None:
    group = object.__new__(NcclGroup)
    for kind, error in ((SimpleNamespace(), None), (SimpleNamespace(get_error=lambda: Error.REMOTE), "REMOTE")):
        group._group = kind
        assert group.error == error
    group._group = SimpleNamespace(get_error=lambda: Error.SUCCESS)
    assert group.error is None
    group._group = None
    assert group.error == "the group for the weight transfer was closed"
