"""Joining the Ray cluster of another process; it is used by pools (``rollout/remote/test_scheduler.py``)."""

import socket
from pathlib import Path

import pytest

from rlhfkit.ray_session import _NEVER_ASSIGNED, RayCluster, _join, port_candidates, unassigned_port


def test_a_machine_that_does_not_reach_the_cluster_learns_at_once_what_to_run() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        message = rf"rank 3 on .* cannot join .* at {address}.* `ray start --address={address}`"
        with pytest.raises(RuntimeError, match=message):
            _join(RayCluster(address, None), "rank 3")


def test_a_port_that_is_listened_on_later_is_one_that_nobody_is_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = port_candidates()
    assert len({*candidates}) == 100
    assert not any(first <= port <= last for port in candidates)
    with socket.create_server(("127.0.0.1", unassigned_port("127.0.0.1"))) as taken:
        number = taken.getsockname()[1]
        assert number in _NEVER_ASSIGNED
        monkeypatch.setattr("rlhfkit.ray_session.port_candidates", lambda: [number, *candidates])
        assert unassigned_port("127.0.0.1") in candidates
        monkeypatch.setattr("rlhfkit.ray_session.port_candidates", lambda: [number])
        with pytest.raises(OSError, match="none of 100 ports from 20000 to 32767 is free at 127"):
            unassigned_port("127.0.0.1")
