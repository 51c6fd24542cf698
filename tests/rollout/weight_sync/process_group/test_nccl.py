"""``NcclGroup`` on one GPU: what needs NCCL and no second process. Covers ``groups.py`` too; written without a GPU."""

import os

import pytest
import torch

from rlhfkit.rollout.weight_sync.process_group.groups import NcclGroup
from rlhfkit.rollout.weight_sync.process_group.rendezvous import open_store

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def test_a_group_leaves_stream_and_environment_as_they_were_and_can_be_formed_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = open_store("127.0.0.1", 30)
    environment = dict(os.environ)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    memory = []
    with torch.cuda.stream(side):
        for number in range(4):
            group = NcclGroup(store, f"weights{number}", 0, 1, 30, device)
            group.connect()
            block = torch.arange(2**20, device=device).view(torch.uint8)
            broadcast = group.broadcast(block)
            broadcast.wait()
            assert broadcast.is_completed()
            assert torch.equal(block.view(torch.int64), torch.arange(2**20, device=device))
            assert torch.cuda.current_stream() == side
            group.close()
            group.close()  # a second time does nothing
            with pytest.raises(RuntimeError, match="was closed"):
                group.broadcast(block)
            memory.append(torch.cuda.mem_get_info()[0])
    assert os.environ == environment
    assert memory[1] - memory[-1] < 2**25  # a communicator that is not freed keeps more


def test_a_broadcast_waits_for_what_the_current_stream_has_in_its_queue() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    group = NcclGroup(open_store("127.0.0.1", 30), "weights", 0, 1, 30, device)
    group.connect()
    torch.cuda._sleep(4 * 10**9)  # type: ignore[no-untyped-call]  # some seconds
    broadcast = group.broadcast(torch.ones(8, dtype=torch.uint8, device=device))
    assert not broadcast.is_completed()
    broadcast.wait()
    assert broadcast.is_completed()
    group.close()
