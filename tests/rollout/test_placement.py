"""Where engines go, and what travels together to those beside a rank."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rlhfkit.rollout.engine import WeightInfo
from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.ipc_sender import chunks
from rlhfkit.rollout.placement import Seat, seats_of_engines


def machines(counts: list[int], gpus: bool = True) -> list[Seat]:
    """Ranks of several machines, machine by machine."""
    return [
        Seat(f"machine{machine}", str(gpu) if gpus else None, on_ray=False)
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
        seats = machines(counts)
        shares = seats_of_engines(seats, sum(counts) // size, size)
        assert [seat for share in shares for seat in share] == seats
        assert all(len({seat.host for seat in share}) == 1 for share in shares)

    def test_an_engine_across_machines_is_refused(self) -> None:
        with pytest.raises(EngineError, match=r"engine 1 would share the GPUs of ranks that are on 2 machines"):
            seats_of_engines(machines([3, 3]), 3, 2)

    def test_more_engines_than_gpus_are_refused(self) -> None:
        with pytest.raises(EngineError, match=r"puts 3 engine\(s\) of 2 GPU\(s\) on the GPUs .* there are 4"):
            seats_of_engines(machines([4]), 3, 2)

    def test_without_gpus_engines_share_the_ranks_cores(self) -> None:
        assert [len(share) for share in seats_of_engines(machines([1], gpus=False), 3, 1)] == [1, 1, 1]


@given(
    sizes=st.lists(st.integers(min_value=1, max_value=50), min_size=1, max_size=20),
    capacity=st.integers(min_value=1, max_value=200),
)
def test_what_travels_by_handle_is_every_tensor_once_in_order_and_fits(sizes: list[int], capacity: int) -> None:
    infos = [WeightInfo(str(number), (size,), torch.float32) for number, size in enumerate(sizes)]
    parts = chunks(infos, capacity)
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    for part in parts:
        assert len(part) == 1 or sum(infos[index].num_bytes for index in part) <= capacity
    for part, following in itertools.pairwise(parts):  # none was closed with room for the next tensor
        assert sum(infos[index].num_bytes for index in [*part, following[0]]) > capacity


@pytest.mark.ray
def test_engines_apart_spread_over_the_machines_of_an_existing_cluster() -> None:
    script = Path(__file__).with_name("two_machines.py")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["machines"] == 2
    assert not report["loopback"]  # engines of another machine must reach the trainer
    for name, message in (
        ("too_many", "3 engine(s) need 3 CPU(s), but Ray's cluster has 2"),
        ("no_gpu", "1 engine(s) need 1 GPU(s), but Ray's cluster has 0"),
        ("taken", "could not place 2 engine(s) of {'CPU': 1.0} within 1 s; free are {'CPU': 0"),
    ):
        text, seconds = report[name]
        assert message in text
        assert seconds < 10
