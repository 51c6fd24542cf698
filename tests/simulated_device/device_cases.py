"""What the simulated device itself does, in a process of its own."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from strategies.toys import save_tiny_llama
from torch import Tensor, nn

from rlhfkit.models import ModelLoading, load_causal_lm
from rlhfkit.strategies.checkpoint import universal
from simulated_device import record_host_waits, register
from simulated_device.device import SimulatedTensor


def device_behaviour(folder: Path) -> dict[str, Any]:
    """Entry point: everything that ``test_device.py`` asserts."""
    register()
    return {
        "waits": waits(),
        "errors": errors(),
        "offloaded": offloaded(folder),
        "resumed": resumed(),
        "resumed at stage 3": resumed_at_stage_3(),
    }


def waits() -> dict[str, list[str]]:
    """The waits of single operations."""
    device = register()
    x, host, mask = torch.ones(3, 4, device=device), torch.ones(3, 4), torch.ones(3, 4, device=device) > 0
    leaf = torch.ones(12, device=device, requires_grad=True)
    operations: dict[str, Callable[[], Any]] = {
        "arithmetic": lambda: (x @ x.T).softmax(-1).sum() * 2.0 + torch.arange(3, device=device),
        "new tensors": lambda: (torch.zeros(3, device=device), torch.rand(3, device=device), x.new_ones(2)),
        "mask = number": lambda: x.clone().__setitem__(mask, 1.0),
        "to the device, not blocking": lambda: (host.to(device, non_blocking=True), x.copy_(host, non_blocking=True)),
        "to the host, not blocking": lambda: x.to("cpu", non_blocking=True),
        "item": lambda: x.sum().item(),
        "if": lambda: bool((x > 0).all()),
        "tolist": lambda: x.tolist(),
        "mask": lambda: x[mask],
        "mask = tensor": lambda: x.clone().__setitem__(mask, torch.ones(12, device=device)),
        "nonzero": lambda: x.nonzero(),
        "indices on the host": lambda: x[torch.arange(2)],
        "to the device": lambda: host.to(device),
        "torch.tensor": lambda: torch.tensor([1.0], device=device),
        "to the host": lambda: x.cpu(),
        "into the host": lambda: host.copy_(x),
        "backward of masked_scatter": lambda: torch.zeros_like(x).masked_scatter(mask, leaf).sum().backward(),
    }
    found = {}
    for name, operation in operations.items():
        with record_host_waits() as recorded:
            operation()
        found[name] = [wait.operation for wait in recorded]
    return found


def errors() -> dict[str, str]:
    """The messages of operations that CUDA refuses."""
    device = register()
    x = torch.ones(2, device=device)
    refused: dict[str, Callable[[], Any]] = {
        "mix": lambda: x + torch.ones(2),
        "generator": lambda: torch.rand(2, device=device, generator=torch.Generator()),
        "numpy": lambda: x.numpy(),
        "fused step counted on the CPU": lambda: fused_step(torch.ones(3, device=device), torch.zeros(())),
    }
    messages = {}
    for name, operation in refused.items():
        try:
            operation()
        except (RuntimeError, TypeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def fused_step(parameter: Tensor, step: Tensor) -> None:
    """A step of torch's fused AdamW with a given counter."""
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[parameter] = {"step": step} | moments
    optimizer.step()


def offloaded(folder: Path) -> dict[str, Any]:
    """Inputs of the layers that a forward pass leaves on the device, and the gradients; without and with offloading."""
    name, ids = save_tiny_llama(folder / "llama"), torch.arange(2, 36).view(2, 17)
    found: dict[str, Any] = {}
    for offload in (False, True):
        model = load_causal_lm(
            name, loading=ModelLoading(attention="eager", offload_activations=offload, gradient_checkpointing=True)
        )
        model = model.to("sim")  # type: ignore[arg-type]
        with record_host_waits() as forward:
            logits = model(input_ids=ids.to("sim"), use_cache=False).logits
        gc.collect()
        shape = (*ids.shape, model.config.hidden_size)
        left = sum(isinstance(each, SimulatedTensor) and each.shape == shape for each in gc.get_objects())
        with record_host_waits() as backward:
            logits.sum().backward()
        places = [wait.place for wait in (*forward, *backward)]
        gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        found["with" if offload else "without"] = {
            "left": left,
            "gradients": [g.tolist() for g in gradients],
            "waits": [place for place in places if "activation_memory" in place],
        }
    return found


def resumed() -> dict[str, Any]:
    """A network on the device continues with the optimizer's state of a converted checkpoint.

    Returns the numbers of two steps with the checkpoint in between on the CPU, without one, and on the device, with
    one, and where the counters of steps are and of which type.
    """
    device = register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        inputs = torch.randn(5, 4)

    def optimizer_of(network: nn.Module) -> torch.optim.AdamW:
        weights = [p for p in network.parameters() if p.dim() > 1]
        biases = [p for p in network.parameters() if p.dim() == 1]
        return torch.optim.AdamW([{"params": weights, "fused": True}, {"params": biases, "weight_decay": 0.0}], lr=0.1)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        network(inputs.to(next(network.parameters()).device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    straight, moved = network, copy.deepcopy(network).to(device)
    step(straight, optimizer := optimizer_of(straight))
    own = optimizer_of(moved)
    saved = optimizer.state_dict()["state"]
    shared = torch.tensor(1.0)  # as DeepSpeed leaves it: on the CPU, one of many parameters
    for number, parameter in enumerate(parameter for group in own.param_groups for parameter in group["params"]):
        moments = {key: saved[number][key].to(device, copy=True) for key in ("exp_avg", "exp_avg_sq")}
        own.state[parameter] = {"step": shared, **moments}
    with torch.no_grad():
        for parameter, other in zip(moved.parameters(), straight.parameters(), strict=True):
            parameter.copy_(other)
    engine: Any = SimpleNamespace(zero_optimization_stage=lambda: 1, optimizer=own, basic_optimizer=own)
    universal._place_steps(engine)
    counters = {name: own.state[parameter]["step"] for name, parameter in moved.named_parameters()}
    places = {name: [counter.device.type, str(counter.dtype)] for name, counter in counters.items()}
    step(straight, optimizer)
    step(moved, own)
    weights = [[parameter.tolist() for parameter in one.parameters()] for one in (straight, moved)]
    counted = sorted({int(counter) for counter in counters.values()})
    return {"weights": weights, "counters": places, "counted": counted}


def resumed_at_stage_3() -> dict[str, list[str]]:
    """Where steps are counted after DeepSpeed has given three parts of two groups one counter, on the CPU."""
    device = register()
    parts = [nn.Parameter(torch.ones(3, device=device)) for _ in range(3)]
    # At stage 3 DeepSpeed's groups have parameters only during a step.
    base = torch.optim.AdamW([{"params": parts[:2], "capturable": True}, {"params": parts[2:]}])
    for group in base.param_groups:
        group["params"] = []
    counter = torch.tensor(7.0, dtype=torch.float64)
    base.state.update({part: {"step": counter} for part in parts})
    optimizer = SimpleNamespace(fp32_partitioned_groups_flat=parts, sub_group_to_group_id={0: 0, 1: 0, 2: 1})
    engine: Any = SimpleNamespace(zero_optimization_stage=lambda: 3, optimizer=optimizer, basic_optimizer=base)
    universal._place_steps(engine)
    counters = [base.state[part]["step"] for part in parts]
    assert len({id(one) for one in (counter, *counters)}) == 4
    return {"places": [one.device.type for one in counters], "types": [str(one.dtype) for one in counters]}
