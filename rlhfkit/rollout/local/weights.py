"""The weights of ``LocalEngine``'s model: memory of its own that is written to, or the policy's tensors themselves.

:class:`WeightLock` lets them change between two tokens, and never while one is computed.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EngineWeights:
    """The parameters of a model by name, tied ones once, whose memory can be the model's own or someone else's.

    Args:
        model: Its parameters may be on the meta device: they get memory when they are first written.
        device: Of the memory that is allocated.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        names: dict[int, str] = {}
        for owner, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    whole = f"{owner}.{name}" if owner else name
                    first = names.setdefault(id(parameter), whole)
                    self._places.setdefault(first, []).append((module, name))
        self._borrowed: dict[str, tuple[Tensor, int]] = {}  # the policy's tensors, and how often they had been written

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def _parameter(self, name: str) -> nn.Parameter:
        module, attribute = self._places[name][0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def _replace(self, name: str, tensor: Tensor) -> None:
        parameter = nn.Parameter(tensor, requires_grad=False)
        for module, attribute in self._places[name]:
            module._parameters[attribute] = parameter

    def copy(self, name: str, tensor: Tensor) -> None:
        """Write a tensor to the model's own memory, which is allocated if there is none."""
        parameter = self._parameter(name)
        if name in self._borrowed or parameter.device != self._device:
            self._borrowed.pop(name, None)
            self._replace(name, torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device))
        self._parameter(name).data.copy_(tensor)

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor can be borrowed: it has the parameter's shape and type and is on the model's device."""
        parameter = self._parameter(name)
        expected = (parameter.shape, parameter.dtype, self._device)
        return (tensor.shape, tensor.dtype, tensor.device) == expected

    def borrow(self, name: str, tensor: Tensor) -> None:
        """Use a tensor that fits in place of memory of the model's own, which is freed."""
        self._borrowed[name] = (tensor, tensor._version)
        self._replace(name, tensor.detach())

    def changed(self) -> str | None:
        """Name of a borrowed tensor that was written in place since, as an optimizer does; ``None`` if there is none.

        torch does not count writes through ``.data``, by which DeepSpeed updates 16-bit weights.
        """
        return next((name for name, (tensor, count) in self._borrowed.items() if tensor._version != count), None)


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Build models whose parameters are on the meta device; buffers, which are computed, are not.

    A model of 7 billion parameters is built in a second, not in the minutes that random numbers on a CPU take.
    """
    modules: Any = nn.Module
    register = modules.register_parameter

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        kept: Any = module._parameters
        if parameter is not None and not parameter.is_meta:
            kept[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    modules.register_parameter = without_memory
    try:
        yield
    finally:
        modules.register_parameter = register


class WeightLock:
    """Held for one token of decoding, or for one load of new weights, which then goes before the next token.

    So new weights never wait for a whole completion, and no token is computed from partly updated weights.

    Args:
        timeout: Seconds that one token or one load may take.
    """

    def __init__(self, timeout: float = 1800.0) -> None:
        self.timeout = timeout
        self._turn = threading.Lock()  # held by who is next: a thread that decodes all the time has to come behind it
        self._weights = threading.Lock()

    def __reduce__(self) -> Any:
        return type(self), (self.timeout,)

    def read(self) -> AbstractContextManager[None]:
        """Hold it for a token; TimeoutError if a load takes too long."""
        return self._hold("new weights took", "to arrive")

    def write(self) -> AbstractContextManager[None]:
        """Hold it for a load; TimeoutError if a token, or another load, takes too long."""
        return self._hold("one token took", "to compute")

    @contextmanager
    def _hold(self, what: str, ending: str) -> Iterator[None]:
        mine = False
        if self._turn.acquire(timeout=self.timeout):
            mine = self._weights.acquire(timeout=self.timeout)
            self._turn.release()
        if not mine:
            raise TimeoutError(f"{what} longer than {self.timeout:g} s {ending}")
        try:
            yield
        finally:
            self._weights.release()
