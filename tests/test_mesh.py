"""Covers ``mesh.py``."""

import pytest

from rlhfkit.mesh import Mesh


def test_every_rank_is_in_one_group_of_each_kind_at_its_place() -> None:
    for rank in range(12):
        mesh = Mesh(rank, 12, sequence=3, tensor=2)
        assert (mesh.data_rank, mesh.sequence_rank, mesh.tensor_rank) == (rank // 6, rank % 6 // 2, rank % 2)
        assert mesh.forward_groups()[mesh.data_rank][mesh.member] == rank
        assert [ranks.index(rank) for ranks in mesh.sequence_groups() if rank in ranks] == [mesh.sequence_rank]
        assert [ranks.index(rank) for ranks in mesh.tensor_groups() if rank in ranks] == [mesh.tensor_rank]
    assert Mesh(0, 12, sequence=3, tensor=2).tensor_groups()[:2] == [[0, 1], [2, 3]]
    assert Mesh(0, 12, sequence=3, tensor=2).sequence_groups()[:2] == [[0, 2, 4], [1, 3, 5]]


def test_ranks_that_cannot_be_divided_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"3 \* tensor_parallel_size 2 = 6 ranks .* does not divide the 8 rank"):
        Mesh(0, 8, sequence=3, tensor=2)
    with pytest.raises(ValueError, match="sequence_parallel_size"):
        Mesh(0, 8, sequence=0)
