"""Training states in CPU memory: what is freed, what stays, and that everything comes back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhfkit import training_states
from rlhfkit.training_states import HostCopies, TrainingStates


class Net(nn.Module):
    """A trained child, a frozen one, and a buffer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.reward_model = nn.Linear(width, width).requires_grad_(False)
        self.register_buffer("table", torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.reward_model(self.policy(x)) @ self.table


def made(width: int = 32) -> tuple[Net, torch.optim.Optimizer, TrainingStates]:
    """A model that was trained for a step, and whose next gradient is there."""
    torch.manual_seed(0)
    net = Net(width)
    optimizer = torch.optim.AdamW(net.policy.parameters(), lr=1e-2)
    step(net, optimizer)
    net(torch.ones(2, width)).square().sum().backward()
    return net, optimizer, TrainingStates(net, lambda: [optimizer], torch.device("cpu"))


def step(net: Net, optimizer: torch.optim.Optimizer) -> float:
    loss = net(torch.ones(2, net.table.shape[0])).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def everything(net: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors whose values count."""
    found = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)]
    return found + [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("chunk", [training_states._CHUNK_BYTES, 1000])
def test_values_come_back_into_the_same_tensors(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Storages may be larger than a chunk of host memory."""
    monkeypatch.setattr(training_states, "_CHUNK_BYTES", chunk)
    net, optimizer, states = made()
    tensors = everything(net, optimizer)
    view = net.policy[0].weight.detach()[3:5]  # a view, as ZeRO has of its flat buffers
    before, expected = [tensor.detach().clone() for tensor in tensors], view.clone()
    sizes = states.state_bytes()
    states.offload_states()
    assert states.offloaded == {part: size for part, size in sizes.items() if size}
    assert not any(states.state_bytes().values())
    assert all(tensor.untyped_storage().nbytes() < 512 for tensor in tensors)
    states.reload_states()
    states.offload_states()  # again, into the memory that is there
    states.reload_states()
    assert states.offloaded == {}
    assert states.state_bytes() == sizes
    assert all(a is b for a, b in zip(tensors, everything(net, optimizer), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert torch.equal(view, expected)
    net.policy[0].weight.data.fill_(2.0)
    assert view.eq(2.0).all()


def test_parts_are_counted_and_move_one_after_the_other() -> None:
    net, _, states = made(width=32)
    matrix, bias = 32 * 32 * 4, 32 * 4
    sizes = {"weights": 4 * matrix, "gradients": 2 * matrix, "communication": 0, "optimizer": 4 * matrix}
    assert bias < 512  # too small to be moved
    assert states.state_bytes() == sizes
    states.offload_states(weights=False)
    assert states.state_bytes() == {**dict.fromkeys(sizes, 0), "weights": sizes["weights"]}
    net(torch.ones(1, 32))  # weights are there
    assert "optimizer" in states.offloaded
    states.offload_states()
    states.reload_states(optimizer=False)
    assert states.offloaded == {"gradients": sizes["gradients"], "optimizer": sizes["optimizer"]}
    states.reload_states()
    assert states.state_bytes() == sizes
    states.offload_states(keep=["reward_model"])  # a child that is needed
    assert net.reward_model.weight.untyped_storage().nbytes()
    assert not net.policy[0].weight.untyped_storage().nbytes()
    states.reload_states()


USES: list[Callable[[Net], Any]] = [
    lambda net: net(torch.ones(1, 32)),
    lambda net: net.policy[2](torch.ones(1, 32)),
    lambda net: net.state_dict(),
    lambda net: net.policy.state_dict(),
]


@pytest.mark.parametrize("use", USES)
def test_what_reads_weights_brings_them_back_first(use: Callable[[Net], Any], caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer, states = made()
    expected = use(net)
    states.offload_states()
    found = use(net)
    assert states.offloaded == {}
    assert "they are brought back" in caplog.text
    values = (expected.values(), found.values()) if isinstance(found, dict) else ([expected], [found])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
    caplog.clear()
    use(net)  # the hooks are gone
    assert not caplog.text
    step(net, optimizer)


def test_an_error_on_the_way_leaves_everything_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer, states = made()
    before = [tensor.detach().clone() for tensor in everything(net, optimizer)]
    take = HostCopies.take

    def fail(self: HostCopies, storages: Any, device: torch.device) -> None:
        storages = list(storages)
        take(self, storages[:1], device)
        if len(storages) == 2:
            raise MemoryError("no more memory")

    monkeypatch.setattr(HostCopies, "take", fail)
    with pytest.raises(MemoryError):
        states.offload_states()
    assert states.offloaded == {}
    assert all(torch.equal(a, b) for a, b in zip(before, everything(net, optimizer), strict=True))


def test_states_on_another_device_are_left_alone() -> None:
    """As ZeRO's own offloading puts them into CPU memory: here the moments are on another device than the weights."""
    _, optimizer, states = made()
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].to("meta")
    sizes = states.state_bytes()
    assert sizes["optimizer"] == 2 * 32 * 32 * 4
    states.offload_states()
    assert states.offloaded["optimizer"] == sizes["optimizer"]
    states.reload_states()
