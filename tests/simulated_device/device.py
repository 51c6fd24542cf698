"""The device ``sim``: tensors that compute on the CPU, but refuse tensors of another device as CUDA does."""

from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from simulated_device.host_waits import ASSIGNMENTS, INDEXING, calling_place, note_wait, waiting_operation

NAME = "sim"
# They make an empty tensor and then resize it, which a simulated tensor cannot be.
RESIZING_FACTORIES = (
    *("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace"),
    *("randperm", "randperm.generator", "tril_indices", "triu_indices"),
)
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")
# Kernels that take addresses: a scalar on the CPU, which other operations take, is an illegal memory access.
FUSED_STEPS = ("aten::_fused_adam_", "aten::_fused_adamw_")


class DeviceMix(RuntimeError):
    """An operation was given tensors of two devices, which CUDA refuses."""


class SimulatedTensor(Tensor):
    """A tensor on ``sim``; ``values`` is the CPU tensor that holds its numbers."""

    values: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> "SimulatedTensor":
        """Put ``values``, which are not copied, on the device."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device(NAME, 0),
        )
        made.values = values
        return made

    def __init__(self, values: Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the values."""
        return _run(func, args, kwargs or {})

    def __repr__(self, **unused: Any) -> str:
        """The values."""
        return f"{self.values!r} on {NAME}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy, a parameter of parameters."""
        made: Tensor = SimulatedTensor(self.values.clone())
        if isinstance(self, nn.Parameter):
            made = nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made.requires_grad_(self.requires_grad)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A CPU tensor is saved."""
        note_wait("copy to the host")
        return self.values.detach().__reduce_ex__(protocol)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, SimulatedTensor) or (new.shape, new.dtype) != (self.shape, self.dtype):
            raise NotImplementedError("the data of a simulated tensor can only be replaced by data of the same kind")
        self.values = new.values

    def tolist(self) -> Any:
        """The values as Python numbers, which wait."""
        note_wait("tolist")
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise, as a CUDA tensor does."""
        raise TypeError(f"can't convert a {NAME} tensor to numpy: copy it to the host with cpu() first")


@cache
def _simulated_subclass(kind: type[Tensor]) -> Any:
    return type(kind.__name__, (kind, SimulatedTensor), {"__module__": kind.__module__})


def _make_subclass(kind: Any, data: Tensor, *args: Any, **kwargs: Any) -> Any:
    """``Tensor._make_subclass``, which cannot make a subclass (a Metric) of a simulated tensor."""
    if not isinstance(data, SimulatedTensor):
        return torch._C.TensorBase._make_subclass(kind, data, *args, **kwargs)
    return SimulatedTensor.__new__(_simulated_subclass(kind), data.detach().values)


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation that has a simulated tensor among its arguments or its results, on the CPU."""
    name = function._schema.name
    if name == "aten::histc" and not args[0].is_floating_point():  # CUDA counts integers too
        args = (args[0].float(), *args[1:])
    simulated: list[SimulatedTensor] = []
    others: list[Tensor] = []
    on_cpu = _on_cpu(args, simulated, others)
    options = {key: _on_cpu(value, simulated, others) for key, value in kwargs.items() if key != "pin_memory"}
    target = kwargs.get("device")
    on_device = bool(simulated) if target is None else torch.device(target).type == NAME
    if name in COPIES:
        _note_copy(name, args, kwargs, on_device)
    else:
        _check_devices(function, args, simulated, others, kwargs.get("generator"))
        waiting = waiting_operation(function, args, kwargs)
        if waiting is not None:
            note_wait(waiting)
    found = function(*on_cpu, **options)
    # In-place operations and out= return an argument, which must stay the same object.
    known = {id(one.values): one for one in simulated}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or not on_device:
            return value
        same = known.get(id(value))
        if same is not None and same.shape != value.shape:
            raise NotImplementedError(f"{name} changes the size of a simulated tensor in place")
        return SimulatedTensor(value) if same is None else same

    return type(found)([wrap(one) for one in found]) if isinstance(found, list | tuple) else wrap(found)


def _on_cpu(value: Any, simulated: list[SimulatedTensor], others: list[Tensor]) -> Any:
    """An argument as the CPU takes it; its tensors are added to those of each kind.

    By hand: the trees of torch take longer than most operations.
    """
    if isinstance(value, SimulatedTensor):
        simulated.append(value)
        return value.values
    if isinstance(value, Tensor):
        others.append(value)
    elif isinstance(value, list | tuple):
        return type(value)([_on_cpu(one, simulated, others) for one in value])
    elif isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def _note_copy(name: str, args: Any, kwargs: dict[str, Any], to_device: bool) -> None:
    """Note a wait if a copy crosses devices and the caller has not asked for one that does not wait."""
    source, target_on_device = args[0], to_device
    if name == "aten::copy_":
        source, target_on_device = args[1], isinstance(args[0], SimulatedTensor)
    elif name == "aten::_copy_from":
        target_on_device = isinstance(args[1], SimulatedTensor)
    if isinstance(source, SimulatedTensor) == target_on_device:
        return
    place = {"aten::_to_copy": 99}.get(name, 2)
    if kwargs.get("non_blocking") or (len(args) > place and args[place]):
        return
    note_wait("copy to the device" if target_on_device else "copy to the host")


def _check_devices(function: Any, args: Any, simulated: list[Any], others: list[Tensor], generator: Any) -> None:
    """Raise where CUDA refuses tensors or generators of two devices. It takes CPU indices, and mostly CPU scalars."""
    name = function._schema.name
    full = f"{name}.{function._overloadname}"
    if simulated and generator is not None and generator.device.type == "cpu":
        raise DeviceMix(f"{name} on {NAME} with a generator on the CPU, in {'{}:{}'.format(*calling_place())}")
    if not simulated or not others:
        return
    if full in INDEXING or name in ASSIGNMENTS:
        indices = {id(index) for index in args[1] if index is not None}
        allowed = isinstance(args[0], SimulatedTensor) and all(not o.dim() or id(o) in indices for o in others)
        if allowed:
            note_wait("copy to the device")
    else:
        allowed = name not in FUSED_STEPS and all(other.dim() == 0 for other in others)
    if not allowed:
        shapes = [[list(one.shape) for one in kind] for kind in (simulated, others)]
        place = "{}:{}".format(*calling_place())
        raise DeviceMix(f"{name} of tensors {shapes[0]} on {NAME} and {shapes[1]} on the CPU, in {place}")


class _Stream:
    """A stream in which everything has ended when the host asks."""

    def __init__(self, *unused: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        note_wait("synchronize")


class _Backend(_DummyBackendModule):
    """The module ``torch.sim``, as far as PyTorch, Lightning and Transformers call it."""

    Stream = _Stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self, *unused: Any) -> None:
        note_wait("synchronize")

    def set_device(self, device: Any) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_rng_state(self, *unused: Any) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, *unused: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        pass

    def device(self, *unused: Any) -> Any:
        return nullcontext()

    def stream(self, *unused: Any) -> Any:
        return nullcontext()

    def current_stream(self, *unused: Any) -> _Stream:
        return _Stream()


_kept: list[Any] = []  # libraries of kernels, which end with their objects


@cache
def register() -> torch.device:
    """Add the device ``sim`` to PyTorch, for the rest of this process; return it. Later calls only return it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
    kernels.impl("empty.memory_format", _empty)
    kernels.impl("empty_strided", _empty_strided)
    kernels.impl("_copy_from", _copy_from)
    for factory in RESIZING_FACTORIES:
        kernels.impl(factory, partial(_make, getattr(torch.ops.aten, factory.partition(".")[0])))
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    _kept.extend([kernels, autocast])
    torch.Tensor._make_subclass = staticmethod(_make_subclass)  # type: ignore[assignment]
    # Backward passes run in the thread that asks for them, as the Python kernels of this device require.
    torch.autograd.set_multithreading_enabled(False)
    # module.to("sim") replaces parameters as a whole; the data of a CPU parameter cannot become simulated.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return torch.device(NAME, 0)


def _make(factory: Any, *args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> Tensor:
    return SimulatedTensor(factory(*args, **kwargs))


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **unused: Any) -> Tensor:
    return SimulatedTensor(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **unused: Any) -> Tensor:
    return SimulatedTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """The copy inside ``torch.tensor(..., device="sim")``, which no other part of this file sees."""
    _note_copy("aten::_copy_from", (source, target, non_blocking), {}, True)
    on_cpu = _on_cpu([target, source], [], [])
    on_cpu[0].copy_(on_cpu[1])
    return target


class SimulatedAccelerator(CPUAccelerator):
    """One simulated device, of which Lightning has as little to do as of the CPU."""

    def setup_device(self, device: torch.device) -> None:
        """Nothing to set up."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """The only device."""
        return [register()]

    @staticmethod
    def name() -> str:
        """As Lightning prints it."""
        return "simulated"


def trainer_arguments() -> dict[str, Any]:
    """Arguments of a Trainer that trains on the simulated device, which is registered."""
    return {
        "accelerator": "auto",  # that of the strategy
        "devices": 1,
        "strategy": SingleDeviceStrategy(device=register(), accelerator=SimulatedAccelerator()),
        # Parameters that are created or replaced in inference mode could not be trained afterwards.
        "inference_mode": False,
    }
