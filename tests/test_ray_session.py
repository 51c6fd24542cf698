"""Joining the Ray cluster of another process; that it works is tested with pools (``rollout/remote/test_pool.py``)."""

import pytest
from strategies.ranks import free_port

from rlhfkit.ray_session import RayCluster, _join


def test_a_machine_that_does_not_reach_the_cluster_learns_at_once_what_to_run() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        RuntimeError, match=rf"rank 3 on .* cannot join .* at {address}.* `ray start --address={address}`"
    ):
        _join(RayCluster(address, None), "rank 3")
