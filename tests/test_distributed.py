"""Exchanges between ranks: on one without a process group, and on two over gloo."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import ranks
from torch import nn

from rlhfkit.distributed import (
    RecoverableError,
    all_reduce,
    exchange_errors,
    full_parameters,
    gather_objects,
    get_rank,
    get_world_size,
    is_sharded,
    run_on_all_ranks,
    true_on_all_ranks,
)


class TransferError(ValueError):
    """A type of a caller's own."""


class EnginesDied(RecoverableError):
    """What all ranks can recover from."""


def test_one_rank_exchanges_nothing_and_raises_errors_as_they_are() -> None:
    assert (get_rank(), get_world_size()) == (0, 1)
    value, tensor, error = object(), torch.tensor([2.0]), ValueError("a bug")
    assert gather_objects(value)[0] is value
    assert all_reduce(tensor) is tensor
    assert tensor.item() == 2
    assert true_on_all_ranks(True)
    assert not true_on_all_ranks(False)

    def fail() -> None:
        raise error

    assert run_on_all_ranks(lambda: 3) == [3]
    with pytest.raises(ValueError, match="a bug") as raised:
        run_on_all_ranks(fail, error_type=KeyError)
    assert raised.value is error
    assert exchange_errors(error) is error
    assert exchange_errors(None) is None
    parameter = nn.Parameter(torch.ones(2))
    with full_parameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.add_(1)
    assert parameter.tolist() == [2, 2]
    assert not is_sharded(parameter)


BUG, DIED, NO_ENGINE = ValueError("a bug"), EnginesDied("died"), EnginesDied("no engine")
TOLD = "rank 1 failed: ValueError: a bug"
ERRORS: list[tuple[list[Exception | None], type[Exception], list[Exception]]] = [
    ([None, BUG], RuntimeError, [RuntimeError(TOLD), BUG]),
    ([None, BUG], TransferError, [TransferError(TOLD), BUG]),
    ([KeyError("a"), BUG], RuntimeError, [KeyError("a"), BUG]),
    # What can be recovered from keeps its type on all ranks, unless one has another error.
    ([None, DIED], RuntimeError, [EnginesDied("rank 1 failed: EnginesDied: died"), DIED]),
    ([NO_ENGINE, DIED], RuntimeError, [NO_ENGINE, DIED]),
    ([DIED, BUG], RuntimeError, [RuntimeError(TOLD), BUG]),
]
"""Errors of two ranks, the type that others raise, and what each rank raises."""


def exchange(folder: Path) -> None:
    """A rank of two; each is a process."""
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    group, rank = dist.new_group(backend="gloo"), get_rank()
    assert get_world_size() == 2
    assert gather_objects({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    assert gather_objects(rank, group=group) == run_on_all_ranks(lambda: rank, group=group) == [0, 1]
    values = torch.tensor([rank + 1.0, 5.0 - rank])
    assert all_reduce(values.clone()).tolist() == [3, 9]
    assert all_reduce(values.clone(), "max").tolist() == [2, 5]
    assert all_reduce(values.clone(), "min").tolist() == [1, 4]
    assert not true_on_all_ranks(rank == 0)
    assert true_on_all_ranks(True)
    objects_pass_through_one_group_beside_nccl(rank)

    for errors, error_type, expected in ERRORS:

        def step(error: Exception | None = errors[rank]) -> int:
            if error is not None:
                raise error
            return rank

        with pytest.raises(type(expected[rank])) as raised:
            run_on_all_ranks(step, error_type=error_type)
        found = [raised.value, exchange_errors(errors[rank], error_type=error_type)]
        assert list(map(repr, found)) == [repr(expected[rank])] * 2, (errors, error_type, found)
    assert exchange_errors(None) is None
    dist.barrier()
    dist.destroy_process_group()


def objects_pass_through_one_group_beside_nccl(rank: int) -> None:
    """Where the default group is NCCL's, which refuses them."""
    real, backend, groups = dist.all_gather_object, dist.get_backend, list[Any]()

    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        assert group is not None, "an object was to pass through NCCL"
        groups.append(group)
        real(values, value, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", gather)
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        assert gather_objects(rank) == run_on_all_ranks(lambda: rank) == [0, 1]
        assert true_on_all_ranks(rank >= 0)
    assert groups == groups[:1] * 3, groups
    assert backend(groups[0]) == "gloo"


@pytest.mark.distributed
def test_two_ranks_have_the_values_and_the_errors_of_all(tmp_path: Path) -> None:
    ranks.run("test_distributed:exchange", 2, tmp_path, 150)
