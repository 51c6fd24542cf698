"""Ray clusters of simulated machines with four GPUs each, for plans; run as a script that prints what was found."""

import json
import os
import time
from contextlib import contextmanager
from io import StringIO
from typing import Any

from ray.cluster_utils import Cluster

from rlhfkit import ModelPool, Placement, RoleResources
from rlhfkit.ray_placement import actor_options, cluster_machines
from rlhfkit.roles import PlacementError

GPUS: Any = {"launcher": "ray", "timeout": 300.0}


def wait_until_free(gpus: int) -> None:
    """Wait until Ray counts so many GPUs as free, which it does some time after they were given back."""
    end = time.monotonic() + 300
    while (free := sum(machine.free.get("GPU", 0) for machine in cluster_machines())) != gpus:
        assert time.monotonic() < end, f"{free} GPUs are free, not {gpus}"
        time.sleep(0.1)


def placed(placement: Placement) -> dict[str, Any]:
    """Machines of each role as sorted counts, and the printed plan."""
    from rich.console import Console

    placement.reserve()
    text = StringIO()
    Console(file=text, width=160).print(placement.table())
    return {
        "machines": {row.role: sorted(row.machines.values()) for row in placement.plan},
        "names": {row.role: sorted(row.machines) for row in placement.plan},
        "processes": {row.role: row.processes for row in placement.plan},
        "table": text.getvalue(),
    }


@contextmanager
def closing(placement: Placement) -> Any:
    """The plan on an idle cluster, whose resources are given back."""
    wait_until_free(12)
    try:
        yield placement
    finally:
        placement.close()


def refused(placement: Placement) -> str:
    """The error of a plan that cannot be met."""
    try:
        placement.reserve()
    except PlacementError as error:
        return str(error)
    placement.close()
    return "it was placed"


def node_of(resources: Any, process: int) -> str:
    """The machine on which an actor of a role starts."""
    import ray

    @ray.remote
    def where() -> str:
        return str(ray.get_runtime_context().get_node_id())

    options = actor_options(resources, process)
    return str(ray.get(where.options(**options).remote()))


def main() -> None:
    """Three machines of four GPUs; a fourth without any."""
    import ray

    report: dict[str, Any] = {}
    small = {"object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 4, **small})
    for _ in range(2):
        cluster.add_node(num_cpus=8, num_gpus=4, **small)
    cluster.add_node(num_cpus=8, resources={"large_memory": 1}, **small)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        roles: Any = {"engines": 3, "reference": 2, "reward": "with reference", "critic": "with trainer"}
        with closing(Placement(trainer=4, **roles, **GPUS)) as placement:
            report["spread"] = placed(placement)
            reference, reward, engines = placement.reference("sft"), placement.reward("rm"), placement.engines()
            assert isinstance(reference, ModelPool)
            assert isinstance(reward, ModelPool)
            report["reference"] = [reference.num_replicas, dict(reference.resources or {})]
            report["reward"] = [reward.num_replicas, dict(reward.resources or {}), placement.critic("rm")]
            report["engines"] = [engines.num_engines, engines.colocate, len(engines.placements("cuda", []))]
            report["ranks"] = {name: str(value) for name, value in placement.ranks().items()} | {
                "devices": placement.devices
            }
            nodes = ray.util.placement_group_table(engines.reserved.placement_group())["bundles_to_node_id"]
            report["there"] = [nodes[number] == node_of(engines.reserved, number) for number in range(3)]
            report["plain"] = ModelPool.of(reference.plain()).plain() == reference.plain()
            wait_until_free(3)
            report["taken"] = refused(Placement(trainer=4, launcher="ray", timeout=1.0))
        with closing(Placement(trainer=8, engines=RoleResources(1, {"GPU": 4}), **GPUS)) as placement:
            report["two_machines"] = placed(placement) | {"devices": placement.devices}
            report["four_gpus"] = placement.engines(tensor_parallel_size=4).num_engines
            try:
                placement.engines(tensor_parallel_size=2)
            except ValueError as error:
                report["wrong_size"] = str(error)
        named = {"processes": 1, "resources": {"large_memory": 1}}
        with closing(Placement(trainer=1, reward=named, device="cpu")) as placement:
            report["named"] = placed(placement)
        report["too_many"] = refused(Placement(trainer=8, engines=4, reference=2, **GPUS))
        report["too_large"] = refused(Placement(trainer=1, engines=RoleResources(1, {"GPU": 8}), **GPUS))
        with closing(Placement(trainer=12, **GPUS)) as placement:  # nothing is held by those that were refused
            report["all"] = placed(placement)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
