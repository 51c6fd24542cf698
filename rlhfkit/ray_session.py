"""The Ray session of this process: joining a cluster or starting Ray on this machine, once, for ranks and engines."""

import os
from typing import Any


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


def cluster_address() -> str:
    """Return the address at which the cluster's machines reach this process; loopback if this is the only machine."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return "127.0.0.1" if nodes == {here} else str(ray.util.get_node_ip_address())
