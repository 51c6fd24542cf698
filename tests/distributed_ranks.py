"""What two ranks do with ``rlhfkit.distributed``; each rank is a process (``strategies/ranks.py``)."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlhfkit.distributed import (
    RecoverableError,
    all_reduce,
    exchange_errors,
    gather_objects,
    get_rank,
    get_world_size,
    run_on_all_ranks,
    true_on_all_ranks,
)


class TransferError(ValueError):
    """A type of a caller's own."""


class EnginesDied(RecoverableError):
    """What all ranks can recover from."""


def message_of(function: Callable[[], Any]) -> str:
    """Type and text of the exception that a call raises; empty if none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def raising(**errors: Exception) -> Callable[[], int]:
    """A step that raises on the ranks that are named ``rank0``, ``rank1``, and returns the rank on others."""

    def step() -> int:
        error = errors.get(f"rank{get_rank()}")
        if error is not None:
            raise error
        return get_rank()

    return step


def gathered_beside_nccl(rank: int) -> list[Any]:
    """Objects of all ranks where the default group is NCCL's, which refuses them, and whether that happens again."""
    real_gather, real_backend = dist.all_gather_object, dist.get_backend
    groups: list[Any] = []

    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        assert group is not None, "an object was to pass through NCCL"
        groups.append(group)
        real_gather(values, value, group=group)

    dist.all_gather_object, dist.get_backend = gather, lambda group=None: "nccl"
    try:
        gathered = [gather_objects(rank), run_on_all_ranks(lambda: rank), true_on_all_ranks(rank >= 0)]
    finally:
        dist.all_gather_object, dist.get_backend = real_gather, real_backend
    return [*gathered, len(groups), len(set(groups)), real_backend(groups[0])]


def exchanges(**_: Any) -> dict[str, Any]:
    """Everything that needs gloo alone."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    group = dist.new_group(backend="gloo")
    rank = get_rank()
    values = torch.tensor([rank + 1.0, 5.0 - rank])
    died, broken = EnginesDied("no engine"), ValueError("a bug")
    own_error = broken if rank == 1 else None
    report: dict[str, Any] = {
        "world_size": get_world_size(),
        "gathered": gather_objects({"rank": rank}),
        "gathered in a group": gather_objects(rank, group=group),
        "gathered beside nccl": gathered_beside_nccl(rank),
        "sum": all_reduce(values.clone()).tolist(),
        "max": all_reduce(values.clone(), "max").tolist(),
        "min": all_reduce(values.clone(), "min").tolist(),
        "true on one": true_on_all_ranks(rank == 0),
        "true on both": true_on_all_ranks(True),
        "results": run_on_all_ranks(raising()),
        "results in a group": run_on_all_ranks(raising(), group=group),
        "one fails": message_of(lambda: run_on_all_ranks(raising(rank1=broken))),
        "one fails, own type": message_of(lambda: run_on_all_ranks(raising(rank1=broken), error_type=TransferError)),
        "both fail": message_of(lambda: run_on_all_ranks(raising(rank0=KeyError("a"), rank1=broken))),
        "one recovers": message_of(lambda: run_on_all_ranks(raising(rank1=died))),
        "both recover": message_of(lambda: run_on_all_ranks(raising(rank0=EnginesDied("none"), rank1=died))),
        "one recovers, one fails": message_of(lambda: run_on_all_ranks(raising(rank0=died, rank1=broken))),
        "exchanged": repr(exchange_errors(own_error, error_type=TransferError)),
        "nothing to exchange": repr(exchange_errors(None)),
    }
    dist.barrier()
    dist.destroy_process_group()
    return report
