"""Exchanges between training ranks: gathered objects and sums, errors that all ranks learn of, parts of parameters.

All ranks must call a collective. Without an initialized process group, or with one rank, nothing is exchanged. Imports
torch only.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


class RecoverableError(RuntimeError):
    """Base class of errors that all ranks can recover from together.

    If every failed rank raised one, :func:`run_on_all_ranks` raises it on all ranks, with its own type. The constructor
    must accept a message alone.
    """


class Failure(NamedTuple):
    """An error as sent to the other ranks."""

    message: str
    recoverable: type[RecoverableError] | None


# ---------------------------------------------------------------- ranks and gathers


def get_rank() -> int:
    """Rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def get_world_size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_objects(value: T, *, group: Any = None) -> list[T]:
    """Return the values of all ranks, by rank, on every rank. A collective.

    Objects never pass through NCCL, which would pad all pickles to the largest in GPU memory, and keep the GPU busy and
    end the process at its time limit when ranks arrive at different times.

    Args:
        value: This rank's value; picklable if there is more than one rank.
        group: Process group of all ranks, for the CPU; ``None``: :func:`cpu_group`. A thread beside the training loop
            needs its own.
    """
    world_size = get_world_size()
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value, group=cpu_group() if group is None else group)
    return values


def all_reduce(tensor: Tensor, operation: Literal["sum", "max", "min"] = "sum", *, group: Any = None) -> Tensor:
    """Reduce a tensor of the same shape and dtype on every rank elementwise, in place, and return it. A collective.

    ``group``: process group of all ranks; ``None``: the default one.
    """
    if get_world_size() > 1:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation.upper()), group=group)
    return tensor


def broadcast(tensor: Tensor) -> Tensor:
    """Give every rank the values of rank 0's tensor, in place, and return it. A collective."""
    if get_world_size() > 1:
        dist.broadcast(tensor, src=0)
    return tensor


def cpu_group() -> Any:
    """Return a process group of all ranks for tensors on the CPU, ``None`` if the default one is. A collective."""
    if get_world_size() == 1 or dist.get_backend() == "gloo":
        return None
    default = dist.group.WORLD
    if default not in _cpu_groups:
        _cpu_groups.clear()
        _cpu_groups[default] = dist.new_group(backend="gloo")
    return _cpu_groups[default]


_cpu_groups: dict[Any, Any] = {}  # default group -> its companion


# ---------------------------------------------------------------- errors


def run_on_all_ranks(
    step: Callable[[], T], *, group: Any = None, error_type: type[Exception] = RuntimeError
) -> list[T]:
    """Run a step on every rank and return all results, by rank; if one rank fails, all raise. A collective.

    Args:
        step: Called once; its result must be picklable if there is more than one rank.
        group: See :func:`gather_objects`.
        error_type: Raised on ranks whose own step succeeded.

    Raises:
        RecoverableError: On all ranks, if every failed rank raised one.
        Exception: Otherwise: the error of ``step`` on a failed rank, an ``error_type`` naming rank and error on others.
    """
    if get_world_size() == 1:
        return [step()]
    result, error = _attempt(step)
    outcomes = gather_objects((result, failure_of(error)), group=group)
    error = error_of_all(error, [failure for _, failure in outcomes], error_type)
    if error is not None:
        raise error
    return [value for value, _ in outcomes]


def run_on_each_rank(step: Callable[[], T], *, error_type: type[Exception] = RuntimeError) -> T:
    """Run a step on every rank and return this rank's result; errors as :func:`run_on_all_ranks`. A collective."""
    result, error = _attempt(step)
    error = exchange_errors(error, error_type=error_type)
    if error is not None:
        raise error
    return cast(T, result)


def _attempt(step: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Run a step; its error is returned, so that the other ranks can be told before it is raised."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def exchange_errors(error: Exception | None, *, error_type: type[Exception] = RuntimeError) -> Exception | None:
    """Return the error that :func:`run_on_all_ranks` would raise here, ``None`` if no rank failed. A collective."""
    return error_of_all(error, gather_objects(failure_of(error)), error_type)


def true_on_all_ranks(condition: bool) -> bool:
    """Whether a condition holds on every rank. A collective."""
    return all(gather_objects(condition))


def failure_of(error: Exception | None) -> Failure | None:
    """Return an error as it is sent to other ranks."""
    if error is None:
        return None
    return Failure(f"{type(error).__name__}: {error}", type(error) if isinstance(error, RecoverableError) else None)


def error_of_all(
    own: Exception | None, failures: list[Failure | None], error_type: type[Exception]
) -> Exception | None:
    """Return what this rank raises, given the failures of all ranks: its own error (a recoverable one only if all are),
    or one that names a rank; ``None`` if no rank failed.
    """
    failed = [(rank, failure) for rank, failure in enumerate(failures) if failure is not None]
    if not failed or (own is not None and not isinstance(own, RecoverableError)):
        return own
    fatal = [(rank, failure) for rank, failure in failed if failure.recoverable is None]
    if own is not None and not fatal:
        return own
    rank, failure = (fatal or failed)[0]
    return (failure.recoverable or error_type)(f"rank {rank} failed: {failure.message}")


# ---------------------------------------------------------------- parts of parameters: ZeRO stage 3, tensor parallelism


def is_sharded(parameter: Tensor) -> bool:
    """Whether DeepSpeed ZeRO stage 3 manages the parameter."""
    return hasattr(parameter, "ds_id")


class TensorPart(NamedTuple):
    """How tensor parallelism divides a parameter. The parameter has it as the attribute :data:`TENSOR_PART`."""

    dimension: int
    sizes: tuple[int, ...]
    """Of the part of each rank of the group along ``dimension``."""
    group: Any


TENSOR_PART = "rlhfkit_tensor_part"


def tensor_part(parameter: Tensor) -> TensorPart | None:
    """How tensor parallelism divides a parameter; ``None`` if each rank has all of it (or its ZeRO-3 shard)."""
    return getattr(parameter, TENSOR_PART, None)


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also while ZeRO stage 3 or tensor parallelism divide it."""
    shape = list(getattr(parameter, "ds_shape", parameter.shape))
    part = tensor_part(parameter)
    if part is not None:
        shape[part.dimension] = sum(part.sizes)
    return tuple(shape)


@contextmanager
def full_parameters(parameters: Iterable[nn.Parameter], *, modifier_rank: int | None = None) -> Iterator[None]:
    """Give divided parameters their full values inside the context; others are left as they are. A collective.

    Parameters are divided by ZeRO stage 3, by tensor parallelism, or by both.

    Args:
        parameters: The same on every rank.
        modifier_rank: Rank whose changes all ranks get when the context ends; ``None``: changes are lost.
    """
    parameters = list(parameters)
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    divided = [parameter for parameter in parameters if tensor_part(parameter) is not None]
    if not sharded and not divided:
        yield
        return
    with ExitStack() as stack:
        if sharded:
            import deepspeed

            # An index in the group that ZeRO 3 divides a parameter over.
            stack.enter_context(deepspeed.zero.GatheredParameters(sharded, modifier_rank=modifier_rank))
        stack.enter_context(_whole_tensor_parts(divided, keep_changes=modifier_rank is not None))
        yield
        if modifier_rank is not None:
            for parameter in parameters:
                if tensor_part(parameter) is not None or _zero_group_is_smaller(parameter):
                    dist.broadcast(parameter.data, src=modifier_rank)


@contextmanager
def _whole_tensor_parts(divided: list[nn.Parameter], *, keep_changes: bool) -> Iterator[None]:
    """Join the parts that tensor parallelism has made of parameters, which ZeRO stage 3 has gathered already."""
    own = {id(parameter): parameter.data for parameter in divided}
    for parameter in divided:
        parameter.data = _joined(parameter)
    try:
        yield
        for parameter in divided if keep_changes else ():
            part = cast(TensorPart, tensor_part(parameter))
            parts = torch.split(parameter.data, list(part.sizes), part.dimension)
            own[id(parameter)].copy_(parts[dist.get_rank(part.group)])
    finally:
        for parameter in divided:
            parameter.data = own[id(parameter)]


def _zero_group_is_smaller(parameter: Any) -> bool:
    """Whether ZeRO 3 divides a parameter over some ranks only, as beside tensor parallelism."""
    return is_sharded(parameter) and dist.get_world_size(parameter.ds_process_group) < get_world_size()


def _joined(parameter: nn.Parameter) -> Tensor:
    """The parts of all ranks of the tensor group, in one tensor."""
    part = cast(TensorPart, tensor_part(parameter))
    data = parameter.data.contiguous()
    shape = list(data.shape)
    parts = []
    for size in part.sizes:
        shape[part.dimension] = size
        parts.append(data.new_empty(shape))
    dist.all_gather(parts, data, group=part.group)
    return torch.cat(parts, part.dimension)


def local_shard(parameter: Any) -> Tensor:
    """Return a flat view of this rank's part of a ZeRO-3 parameter, without the uninitialized padding at the end."""
    shard: Tensor = parameter.ds_tensor.data.view(-1)
    start = dist.get_rank(parameter.ds_process_group) * shard.numel()
    return shard[: max(0, parameter.ds_numel - start)]
