"""How often the host waits for the device, and in which files: the table, and a test that holds it.

Lower a number that a change has made too high; raise one only for a reason that stands beside it.
"""

from collections import Counter
from typing import Any

import pytest
from strategies import ranks

pytestmark = pytest.mark.distributed

FORWARD = {"models/attention/layout.py": 1}
"""Of a forward pass over a packed batch that was made on the device: its lengths are read."""


LIMITS: dict[str, dict[str, int]] = {
    "forward of a packed batch": FORWARD,
    "its backward": {},
    # The reference that takes the kernel's place reads four tensors in each of two layers; a kernel reads none.
    "forward of a packed batch with a varlen kernel": {**FORWARD, "models/attention/varlen.py": 8},
    "its backward with a varlen kernel": {},
    # Whether to step depends on all gradients.
    "a clipped step with NonFiniteGuard": {"callbacks/guard.py": 1},
    # The check that all weights are finite, however many there are.
    "a copy of all weights into LocalEngine": {"rollout/weight_sync/source.py": 1},
    # The probe that they arrived is a forward pass of each side, whose results are compared on the host.
    "a weight sync with its probe": {
        "rollout/weight_sync/source.py": 1,
        "modules/base.py": 1,
        "rollout/local/engine.py": 3,
    },
    "8 more tokens of a batch of LocalEngine": {"rollout/local/generator.py": 8},
    "a batch of LocalEngine without its tokens": {"rollout/local/generator.py": 11},
    # The log-probs are copied to the host once for each model.
    "preparing an iteration: two forward passes over it": {"modules/on_policy/forward_passes.py": 2},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return ranks.run("simulated_device.waiting_cases:every_activity", 1, tmp_path_factory.mktemp("waits"))[0]


@pytest.mark.parametrize("activity", LIMITS)
def test_the_host_waits_for_the_device_at_most_as_often_as_listed(found: dict[str, Any], activity: str) -> None:
    files: Counter[str] = Counter()
    for line, count in found[activity].items():
        files[line.split()[0]] += count
    assert files <= Counter(LIMITS[activity]), found[activity]
