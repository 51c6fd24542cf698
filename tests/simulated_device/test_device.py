"""The simulated device behaves as CUDA does, as far as tests rely on it; and what of rlhfkit only a device shows."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from strategies import ranks
from strategies.toys import save_tiny_llama
from torch import nn

from rlhfkit.models import ModelLoading, load_causal_lm
from rlhfkit.strategies.checkpoint import universal
from simulated_device import record_host_waits, register
from simulated_device.device import DeviceMix, SimulatedTensor


@pytest.mark.distributed
@pytest.mark.parametrize("behaviour", ["waits", "refusals", "offloaded", "resumed"])
def test_the_device_has_the_behaviour(behaviour: str, tmp_path: Path) -> None:
    ranks.run(f"simulated_device.test_device:{behaviour}", ranks=1, folder=tmp_path)


def waits(folder: Path) -> None:
    """An operation waits if the host needs its values or their number; those that do not: ``test_training.py``."""
    device = register()
    x, host, mask = torch.ones(3, 4, device=device), torch.ones(3, 4), torch.ones(3, 4, device=device) > 0
    leaf = torch.ones(12, device=device, requires_grad=True)
    operations: list[tuple[Callable[[], Any], str]] = [
        (lambda: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda: bool((x > 0).all()), "aten::_local_scalar_dense"),
        (lambda: x.tolist(), "tolist"),
        (lambda: x[mask], "aten::index with a mask"),
        (lambda: x.clone().__setitem__(mask, torch.ones(12, device=device)), "aten::index_put_ with a mask"),
        (lambda: x.nonzero(), "aten::nonzero"),
        (lambda: x[torch.arange(2)], "copy to the device"),
        (lambda: host.to(device), "copy to the device"),
        (lambda: torch.tensor([1.0], device=device), "copy to the device"),
        (lambda: x.cpu(), "copy to the host"),
        (lambda: host.copy_(x), "copy to the host"),
        (
            lambda: torch.zeros_like(x).masked_scatter(mask, leaf).sum().backward(),
            "aten::masked_scatter_backward",
        ),
    ]
    for number, (operation, expected) in enumerate(operations):
        with record_host_waits() as recorded:
            operation()
        assert [wait.operation for wait in recorded] == [expected], f"{number}: {recorded}"


def refusals(folder: Path) -> None:
    """Tensors of two devices do not mix."""
    device = register()
    x = torch.ones(2, device=device)
    with pytest.raises(DeviceMix, match=r"aten::add of tensors \[\[2\]\] on sim and \[\[2\]\] on the CPU"):
        x + torch.ones(2)
    with pytest.raises(DeviceMix, match="aten::uniform_ on sim with a generator on the CPU"):
        torch.rand(2, device=device, generator=torch.Generator())
    with pytest.raises(TypeError, match="can't convert a sim tensor to numpy"):
        x.numpy()
    # torch takes a counter of steps on the CPU, and the kernel of CUDA reads an address of the CPU.
    x.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW([x], fused=True)
    moments = {key: torch.zeros_like(x) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[x] = {"step": torch.zeros(())} | moments
    with pytest.raises(DeviceMix, match="aten::_fused_adamw_ of tensors"):
        optimizer.step()


def offloaded(folder: Path) -> None:
    """Checkpoints (models/activation_memory.py) leave the device and come back for the same numbers, without waits."""
    register()
    name, ids = save_tiny_llama(folder / "llama"), torch.arange(2, 36).view(2, 17)
    left, found = [], []
    for offload in (False, True):
        loading = ModelLoading(attention="eager", offload_activations=offload, gradient_checkpointing=True)
        model = load_causal_lm(name, loading=loading).to("sim")  # type: ignore[arg-type]
        with record_host_waits() as recorded:
            logits = model(input_ids=ids.to("sim"), use_cache=False).logits
            gc.collect()
            shape = (*ids.shape, model.config.hidden_size)
            inputs = [each for each in gc.get_objects() if isinstance(each, SimulatedTensor) and each.shape == shape]
            left.append(len(inputs))
            del inputs
            logits.sum().backward()
        assert not [wait for wait in recorded if "activation_memory" in wait.place]
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    assert left[0] - left[1] == 2, "inputs of layers on the device after a forward pass"
    torch.testing.assert_close(*found, rtol=0, atol=0)


def resumed(folder: Path) -> None:
    """From a converted checkpoint each part has a counter of steps of its own, where its kernel reads it.

    DeepSpeed leaves one for all on the CPU (strategies/checkpoint/universal.py).
    """
    device = register()
    for stage, kernel in ((1, "fused"), (3, "capturable")):
        parts = [nn.Parameter(torch.ones(3, device=device)) for _ in range(3)]
        base = torch.optim.AdamW([{"params": parts[:2], kernel: True}, {"params": parts[2:]}])
        counter = torch.tensor(7.0, dtype=torch.float64)
        base.state.update({part: {"step": counter} for part in parts})
        if stage == 3:  # DeepSpeed's groups have parameters only during a step
            for group in base.param_groups:
                group["params"] = []
        optimizer = SimpleNamespace(fp32_partitioned_groups_flat=parts, sub_group_to_group_id={0: 0, 1: 0, 2: 1})
        engine: Any = SimpleNamespace(
            zero_optimization_stage=lambda stage=stage: stage, optimizer=optimizer, basic_optimizer=base
        )
        universal._place_steps(engine)
        counters = [base.state[part]["step"] for part in parts]
        assert len({id(one) for one in (counter, *counters)}) == 4
        assert [one.device.type for one in counters] == ["sim", "sim", "cpu"]
        assert [one.dtype for one in counters] == [torch.float32, torch.float32, torch.float64]
