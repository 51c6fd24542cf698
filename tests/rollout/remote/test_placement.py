"""Where engines go: beside ranks, or on devices that no rank has; and what is sent together to those beside a rank.

Covers ``placement.py``, ``ray_placement.py``, ``ray_session.py`` and ``weight_sync/cuda_ipc.py``.
"""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from simulated_driver import simulated_driver, simulated_uuid
from strategies import ranks

from rlhfkit.ray_placement import fewest_machines
from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.vllm.placement import RankLocation, assign_ranks, check_locations
from rlhfkit.rollout.weight_sync.cuda_ipc import split_into_chunks


def machines(counts: list[int], gpus: bool = True) -> list[RankLocation]:
    """Ranks of several machines, machine by machine."""
    return [
        RankLocation(f"machine{machine}", str(gpu) if gpus else None, on_ray=False)
        for machine, count in enumerate(counts)
        for gpu in range(count)
    ]


class TestColocatedEngines:
    """Each on the GPUs of ranks that are neighbours."""

    @given(
        counts=st.lists(st.integers(min_value=1, max_value=4), min_size=1, max_size=4),
        size=st.integers(min_value=1, max_value=4),
    )
    def test_no_gpu_has_two_engines_and_no_engine_two_machines(self, counts: list[int], size: int) -> None:
        counts = [count * size for count in counts]  # so many ranks on each machine
        locations = machines(counts)
        shares = assign_ranks(locations, sum(counts) // size, size)
        assert [rank for share in shares for rank in share] == locations
        assert all(len({rank.host for rank in share}) == 1 for share in shares)

    @pytest.mark.parametrize(
        ("counts", "message"),
        [
            ([3, 3], r"engine 1 would share the GPUs of ranks that are on 2 machines"),
            ([4], r"puts 3 engine\(s\) of 2 GPU\(s\) on the GPUs .* there are 4"),
        ],
    )
    def test_engines_across_machines_and_more_than_gpus_are_refused(self, counts: list[int], message: str) -> None:
        with pytest.raises(EngineError, match=message):
            assign_ranks(machines(counts), 3, 2)

    def test_without_gpus_engines_share_the_ranks_cores(self) -> None:
        assert [len(share) for share in assign_ranks(machines([1], gpus=False), 3, 1)] == [1, 1, 1]


def test_one_gpu_is_known_by_its_uuid_else_by_machine_and_id() -> None:
    """Two tasks of Slurm may call different GPUs 0, and two containers of one machine have different names for it."""
    here = RankLocation("a", "0", on_ray=False, uuid="x")
    assert here.has_same_gpu(RankLocation("container", "3", on_ray=True, uuid="x"))
    assert not here.has_same_gpu(RankLocation("a", "0", on_ray=True, uuid="y"))
    assert here.has_same_gpu(RankLocation("a", "0", on_ray=True))
    assert not here.has_same_gpu(RankLocation("a", "1", on_ray=True))
    assert not here.has_same_gpu(RankLocation("b", "0", on_ray=True))
    assert not RankLocation("a", None, on_ray=False).has_same_gpu(RankLocation("a", None, on_ray=True))


def test_a_uuid_in_the_variable_is_known_without_the_driver() -> None:
    uuid = simulated_uuid(3)
    by_name = RankLocation("a", f"GPU-{uuid}", on_ray=False)
    assert by_name.has_same_gpu(RankLocation("b", "5", on_ray=True, uuid=uuid))
    assert by_name.has_same_gpu(RankLocation("a", f"GPU-{uuid}", on_ray=True))
    assert not by_name.has_same_gpu(RankLocation("a", "3", on_ray=True, uuid=simulated_uuid(4)))


def test_ranks_that_share_a_gpu_are_refused_before_ray_is_asked_for_anything() -> None:
    same = [RankLocation("a", str(gpu), on_ray=False, uuid="x") for gpu in (0, 3)]
    with pytest.raises(EngineError, match="ranks 0 and 1 are both on GPU 3 of a: give every rank"):
        check_locations(same)
    # Each in a container that calls its GPU 0, and no driver that tells them apart.
    with pytest.raises(EngineError, match=r"ranks 1 and 2 both call their GPU '0' on a, .* no UUIDs"):
        check_locations([RankLocation("b", "0", on_ray=False), *[RankLocation("a", "0", on_ray=False)] * 2])
    check_locations([*machines([4, 4]), *machines([2], gpus=False)])
    check_locations([RankLocation("a", "0", on_ray=False, uuid=uuid) for uuid in "xyz"])


@given(
    tensors=st.lists(
        st.tuples(st.integers(min_value=1, max_value=50), st.sampled_from([torch.int8, torch.bfloat16, torch.float32])),
        min_size=1,
        max_size=20,
    ),
    capacity=st.integers(min_value=1, max_value=200),
)
def test_what_travels_by_handle_is_every_tensor_once_in_order_in_line_and_fits(
    tensors: list[tuple[int, torch.dtype]], capacity: int
) -> None:
    infos = [WeightInfo(str(number), (size,), dtype) for number, (size, dtype) in enumerate(tensors)]
    parts = split_into_chunks(infos, capacity)
    assert [index for part in parts for index in part] == list(range(len(tensors)))
    sizes = [[infos[index].num_bytes for index in part] for part in parts]
    for part, own in zip(parts, sizes, strict=True):
        assert len(part) == 1 or sum(own) <= capacity
        assert all(sum(own[:place]) % infos[index].dtype.itemsize == 0 for place, index in enumerate(part))
    for (_, following), own in zip(itertools.pairwise(parts), sizes, strict=False):
        # None was closed with room for the next tensor in line.
        after = infos[following[0]]
        assert sum(own) + after.num_bytes > capacity or sum(own) % after.dtype.itemsize


@pytest.mark.ray
def test_engines_apart_spread_over_the_machines_of_an_existing_cluster(tmp_path: Path) -> None:
    ranks.run("rollout.remote.two_machines:place_engines", 1, tmp_path)


EIGHT = {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("processes", "nodes", "expected"),
    [
        (8, [EIGHT] * 2, 1),
        (16, [EIGHT] * 2, 2),
        (16, [EIGHT], None),
        (16, [EIGHT, EIGHT | {"GPU": 7.0}], None),  # the ranks have one
        (16, [EIGHT, *[EIGHT | {"GPU": 4.0}] * 3], 4),  # equally many on each
        (9, [EIGHT] * 2, None),  # no equal parts
        (9, [EIGHT] * 3, 3),
        (1, [EIGHT | {"GPU": 0.0}], None),
    ],
)
def test_as_few_machines_as_have_room_for_equal_parts(
    processes: int, nodes: list[dict[str, float]], expected: int | None
) -> None:
    assert fewest_machines(processes, {"CPU": 1.0, "GPU": float(processes)}, nodes) == expected


@pytest.mark.ray
@pytest.mark.distributed
class TestEnginesApart:
    """No engine computes on a GPU of a training rank's, whoever has started the ranks, on a node that declares four."""

    def test_on_a_cluster_that_counts_all_gpus(self, tmp_path: Path) -> None:
        """Those of ranks of Slurm it gives to engines, which refuse to start; then ranks that it starts itself ask."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with subprocess.Popen(
            [sys.executable, Path(__file__).with_name("gpu_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | simulated_driver(tmp_path, 4) | {"RAY_AUTH_MODE": "disabled"},
            text=True,
        ) as cluster:
            assert cluster.stdout is not None
            address = next(line.split()[1] for line in cluster.stdout if line.startswith("address "))
            ranks.run("rollout.remote.gpu_ranks:of_slurm", 2, tmp_path, address=address)
            cluster.communicate(timeout=120)
        assert cluster.returncode == 0

    @pytest.mark.parametrize("kind", ["of_a_script", "that_see_their_own"])
    def test_from_ranks_that_start_ray_themselves(self, tmp_path: Path, kind: str) -> None:
        """Those that see their own GPU alone leave none for a Ray of theirs, which is an error."""
        ranks.run(f"rollout.remote.gpu_ranks:{kind}", 2, tmp_path)
