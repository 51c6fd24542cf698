"""Over how many machines an engine's processes are divided."""

import pytest

from rlhfkit.rollout.remote.division import machines_per_engine

EIGHT = {"CPU": 64.0, "GPU": 8.0}


@pytest.mark.parametrize(
    ("processes", "nodes", "machines"),
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
    processes: int, nodes: list[dict[str, float]], machines: int | None
) -> None:
    assert machines_per_engine(processes, {"CPU": 1.0, "GPU": float(processes)}, nodes) == machines
