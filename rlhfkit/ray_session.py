"""The Ray session of this process: joining a cluster or starting Ray on this machine, once, for ranks and engines."""

import contextlib
import os
import random
import socket
import threading
from dataclasses import dataclass
from typing import Any

_AUTH_MODE = "RAY_AUTH_MODE"
_REACH_SECONDS = 30.0
_NEVER_ASSIGNED = range(20000, 32768)  # Linux assigns 32768 to 60999; Ray's workers have 10002 to 19999


def join_or_start_ray(**local_session: Any) -> bool:
    """Use the Ray session of this process, else join the cluster in ``RAY_ADDRESS``, else start Ray on this machine.

    Args:
        **local_session: Arguments of ``ray.init`` for a session started here, which lives until this process ends.

    Returns:
        Whether a session was started here.
    """
    import ray

    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
        return False
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **local_session)
    return True


def port_candidates() -> list[int]:
    """Return ports, in random order, of those that a system gives to nobody who asks for any free one.

    For processes that are told a port and listen there later: one that the system has assigned (``bind`` to port 0)
    may be assigned to another process in between.
    """
    return random.SystemRandom().sample(_NEVER_ASSIGNED, 100)


def unassigned_port(address: str) -> int:
    """Return the first of some :func:`port_candidates` that is free at an address of this machine."""
    for port in port_candidates():
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port
    raise OSError(f"none of 100 ports from {_NEVER_ASSIGNED[0]} to {_NEVER_ASSIGNED[-1]} is free at {address}")


def cluster_address() -> str:
    """Return the address at which the cluster's machines reach this process; loopback if this is the only machine."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return "127.0.0.1" if nodes == {here} else str(ray.util.get_node_ip_address())


@dataclass(frozen=True)
class RayCluster:
    """What other processes need to join the Ray cluster of this one, besides the token, which passes no network."""

    address: str
    auth_mode: str | None
    """``RAY_AUTH_MODE``, which Ray sets in the process that starts a session of its own."""


def this_cluster() -> RayCluster:
    """Return the cluster that this process is connected to."""
    import ray

    return RayCluster(str(ray.get_runtime_context().gcs_address), os.environ.get(_AUTH_MODE))


class JoinedRay:
    """This process's use of the Ray cluster of another process, until :meth:`close`.

    The first use joins the cluster unless the process has a session already (as ranks on Ray have); the last one that
    ends leaves it, as Ray kills processes that stay joined to a cluster that has ended.

    Raises:
        RuntimeError: If this machine is not part of the cluster; ``member`` names this process in the message.
    """

    _lock = threading.Lock()
    _users = 0  # of a session that was joined here

    def __init__(self, cluster: RayCluster, *, member: str) -> None:
        import ray

        self._counted = False
        with JoinedRay._lock:
            if JoinedRay._users == 0 and ray.is_initialized():
                return
            if JoinedRay._users == 0:
                _join(cluster, member)
            JoinedRay._users += 1
            self._counted = True

    def close(self) -> None:
        """End this use; a second call does nothing."""
        import ray

        with JoinedRay._lock:
            if self._counted:
                self._counted = False
                JoinedRay._users -= 1
                if JoinedRay._users == 0:
                    ray.shutdown()


def _join(cluster: RayCluster, member: str) -> None:
    import ray

    if cluster.auth_mode is not None and _AUTH_MODE not in os.environ:
        from ray._raylet import AuthenticationTokenLoader, Config

        os.environ[_AUTH_MODE] = cluster.auth_mode
        Config.initialize("")  # Ray 2.60 has read the variable when it was imported, and does this where it sets it
        AuthenticationTokenLoader.instance().reset_cache()
    host, _, port = cluster.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS).close()  # Ray tries for minutes
        ray.init(address=cluster.address, log_to_driver=False, logging_level="WARNING")
    except (RuntimeError, ConnectionError, OSError) as error:
        raise RuntimeError(
            f"{member} on {socket.gethostname()} cannot join the Ray cluster at {cluster.address}, over which it asks "
            f"the engines: {str(error).splitlines()[0]}. Ray must run on every rank's machine: run "
            f"`ray start --address={cluster.address}` there before the run, or `ray start --head` on one machine, that "
            "with its address on the others, and set RAY_ADDRESS; with token authentication (RAY_AUTH_MODE=token) all "
            "need the same token"
        ) from error
