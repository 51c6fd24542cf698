"""Exchanges between ranks: on one without a process group, and on two over gloo."""

from typing import Any

import pytest
import torch
from strategies import ranks
from torch import nn

from rlhfkit.distributed import (
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


@pytest.mark.distributed
class TestTwoRanks:
    """Real processes over gloo."""

    @pytest.fixture(scope="class")
    def reports(self, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
        return ranks.run("distributed_ranks:exchanges", 2, tmp_path_factory.mktemp("exchanges"), 150)

    def test_every_rank_has_the_values_of_all(self, reports: list[dict[str, Any]]) -> None:
        for report in reports:
            assert report["world_size"] == 2
            assert report["gathered"] == [{"rank": 0}, {"rank": 1}]
            assert report["gathered in a group"] == [0, 1]
            assert (report["sum"], report["max"], report["min"]) == ([3, 9], [2, 5], [1, 4])
            assert not report["true on one"]
            assert report["true on both"]
            assert report["results"] == report["results in a group"] == [0, 1]

    def test_objects_pass_through_one_gloo_group_where_the_default_is_nccl(self, reports: list[dict[str, Any]]) -> None:
        assert [report["gathered beside nccl"] for report in reports] == [[[0, 1], [0, 1], True, 3, 1, "gloo"]] * 2

    def test_an_error_of_one_rank_is_raised_on_both(self, reports: list[dict[str, Any]]) -> None:
        assert [report["one fails"] for report in reports] == [
            "RuntimeError: rank 1 failed: ValueError: a bug",
            "ValueError: a bug",
        ]
        assert reports[0]["one fails, own type"] == "TransferError: rank 1 failed: ValueError: a bug"
        assert [report["both fail"] for report in reports] == ["KeyError: 'a'", "ValueError: a bug"]
        assert [report["exchanged"] for report in reports] == [
            "TransferError('rank 1 failed: ValueError: a bug')",
            "ValueError('a bug')",
        ]
        assert [report["nothing to exchange"] for report in reports] == ["None", "None"]

    def test_a_recoverable_error_keeps_its_type_on_both_unless_one_rank_has_another(
        self, reports: list[dict[str, Any]]
    ) -> None:
        assert [report["one recovers"] for report in reports] == [
            "EnginesDied: rank 1 failed: EnginesDied: no engine",
            "EnginesDied: no engine",
        ]
        assert [report["both recover"] for report in reports] == ["EnginesDied: none", "EnginesDied: no engine"]
        assert [report["one recovers, one fails"] for report in reports] == [
            "RuntimeError: rank 1 failed: ValueError: a bug",
            "ValueError: a bug",
        ]
