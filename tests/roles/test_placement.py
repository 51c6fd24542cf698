"""Plans on simulated machines, what each role is given, and errors that say what is missing.

Covers placement.py and ray_placement.py.
"""

import pickle
import time
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import ray_worker
from strategies import ranks

from rlhfkit import CriticPool, ModelPool, Placement, RoleResources
from rlhfkit.ray_placement import PlacementError, ReservedResources, actor_options, cluster_machines

pytestmark = pytest.mark.ray
GPUS: Any = {"launcher": "ray", "timeout": 300.0}


def wait_until_free(gpus: int) -> None:
    """Wait until Ray counts so many GPUs as free, which it does some time after they were given back."""
    end = time.monotonic() + 300
    while (free := sum(machine.free.get("GPU", 0) for machine in cluster_machines())) != gpus:
        assert time.monotonic() < end, f"{free} GPUs are free, not {gpus}"
        time.sleep(0.1)


@contextmanager
def placed(machines: dict[str, list[int]], **arguments: Any) -> Any:
    """The plan on an idle cluster, whose resources are given back; ``machines`` of each role as sorted counts."""
    wait_until_free(12)
    placement = Placement(**arguments)
    try:
        placement.reserve()
        found = {row.role: sorted(row.machines.values()) for row in placement.plan}
        assert found == machines, found
        yield placement
    finally:
        placement.close()


def refused(message: str, **arguments: Any) -> None:
    """A plan that cannot be met."""
    with pytest.raises(PlacementError, match=message):
        Placement(**arguments).reserve()


def node_of(resources: Any, process: int) -> str:
    """The machine on which an actor of a role starts."""
    import ray

    @ray.remote
    def where() -> str:
        return str(ray.get_runtime_context().get_node_id())

    return str(ray.get(where.options(**actor_options(resources, process)).remote()))


def ranks_are_packed_and_engines_spread_over_the_other_machines_and_actors_start_there() -> None:
    """And each role gets what its constructor takes."""
    import ray

    roles: Any = {"engines": 3, "reference": 2, "reward": "with reference", "critic": "with trainer"}
    machines = {"trainer": [4], "engines": [1, 2], "reference": [2], "reward": [2], "critic": []}
    with placed(machines, trainer=4, **roles, **GPUS) as placement:
        names = {row.role: set(row.machines) for row in placement.plan}
        assert not names["trainer"] & (names["engines"] | names["reference"])
        processes = {row.role: row.processes for row in placement.plan}
        assert processes == {"trainer": 4, "engines": 3, "reference": 2, "reward": 2, "critic": 4}
        reference, reward, engines = placement.reference("sft"), placement.reward("rm"), placement.engines()
        for pool in (reference, reward):
            assert isinstance(pool, ModelPool)
            assert (pool.num_replicas, dict(pool.resources or {})) == (2, {"GPU": 0.5, "CPU": 0.5})
        assert placement.critic("rm") == "rm"  # the name of a child's model
        assert (engines.num_engines, engines.colocate, len(engines.placements("cuda", []))) == (3, False, 3)
        assert (placement.ranks()["launcher"], placement.devices) == ("ray", 4)
        nodes = ray.util.placement_group_table(engines.reserved.placement_group())["bundles_to_node_id"]
        assert [node_of(engines.reserved, number) for number in range(3)] == [nodes[number] for number in range(3)]
        plain = reference.plain()
        assert ModelPool.of(plain).plain() == plain  # a checkpoint keeps numbers, not places
        wait_until_free(3)
        missing = r"could not place 4 process\(es\) of trainer of 1 GPU \+ 1 CPU \(STRICT_PACK\) within 1 s"
        refused(rf"(?s){missing}.*2 GPU \+ 6 CPU", trainer=4, launcher="ray", timeout=1.0)


def ranks_that_no_machine_has_room_for_are_divided_evenly() -> None:
    engine = RoleResources(1, {"GPU": 4})
    with placed({"trainer": [4, 4], "engines": [1]}, trainer=8, engines=engine, **GPUS) as placement:
        assert placement.devices == 4
        assert placement.engines(tensor_parallel_size=4).num_engines == 1
        with pytest.raises(ValueError, match=r"has 2 process\(es\) with a GPU each, and 4 GPU\(s\) are held"):
            placement.engines(tensor_parallel_size=2)


def resources_may_have_names_of_their_own_and_ranks_be_outside_ray() -> None:
    from rich.console import Console

    named = {"processes": 1, "resources": {"large_memory": 1}}
    with placed({"trainer": [1], "reward": [1]}, trainer=1, reward=named, device="cpu") as placement:
        text = StringIO()
        Console(file=text, width=160).print(placement.table())
        assert "not started by Ray" in text.getvalue()


def a_plan_that_cannot_be_met_says_what_is_missing_and_what_there_is_and_holds_nothing() -> None:
    needed = r"^the plan needs 14 GPU\(s\) \(trainer 8, engines 4, reference 2\), and Ray's cluster has 12 \("
    refused(needed + ".*: 2 are missing.", trainer=8, engines=4, reference=2, **GPUS)
    large = r"a process of engines needs 8 GPU\(s\) on one machine, and the largest has 4"
    refused(large, trainer=1, engines=RoleResources(1, {"GPU": 8}), **GPUS)
    with placed({"trainer": [4, 4, 4]}, trainer=12, **GPUS):
        pass


def on_simulated_machines(folder: Path) -> None:
    """A driver, itself forked: three machines of four GPUs."""
    import ray
    from ray.cluster_utils import Cluster

    ray_worker.use()
    machine = {"num_cpus": 8, "num_gpus": 4, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args=machine | {"include_dashboard": False})
    for resources in ({}, {"large_memory": 1}):
        cluster.add_node(**machine, resources=resources)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "NODE_RANK"):  # of a launcher, whose other ranks place nothing
            patch.delenv(name)
        patch.setenv("RAY_ADDRESS", cluster.address)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            cluster.wait_for_nodes()
            ranks_are_packed_and_engines_spread_over_the_other_machines_and_actors_start_there()
            ranks_that_no_machine_has_room_for_are_divided_evenly()
            resources_may_have_names_of_their_own_and_ranks_be_outside_ray()
            a_plan_that_cannot_be_met_says_what_is_missing_and_what_there_is_and_holds_nothing()
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.smoke
def test_plans_on_simulated_machines(tmp_path: Path) -> None:
    ranks.run(on_simulated_machines, 1, tmp_path)


def test_a_role_that_the_plan_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="the plan has no teacher"):
        Placement(trainer=1, reference=1).teacher("model")


def test_arguments_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")  # which places nothing
    shared = Placement(trainer=1, reward="with trainer", critic="with trainer")
    assert shared.reward("model") == "model"
    with pytest.raises(ValueError, match=r"reward='with trainer'\) makes a child .*takes no reads: leave that out, or"):
        shared.reward("model", reads="chat")
    with pytest.raises(ValueError, match="takes no precision, strategy: leave"):
        shared.critic("model", strategy="rlhf_zero3", precision="32")
    with pytest.raises(ValueError, match=r"Placement\(reward=...\) decides num_replicas: leave it out"):
        Placement(trainer=1, reward=2).reward("model", num_replicas=3)


def test_other_ranks_of_a_script_place_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    placement = Placement(trainer=2, engines=2, reference={"processes": 2, "resources": {"GPU": 1}})
    pool: Any = placement.reference("sft")
    assert (pool.num_replicas, pool.resources) == (2, {"GPU": 1})
    assert placement.engines().num_engines == 2
    assert placement.ranks() == {}
    assert placement.plan == []
    critic: Any = Placement(trainer=2, critic={"processes": 2, "resources": {"GPU": 1}}).critic("rm")
    assert (critic.num_ranks, critic.resources) == (2, {"GPU": 1})
    assert Placement(trainer=2, critic="with trainer").critic("rm") == "rm"


def test_a_critic_keeps_where_its_ranks_are_and_a_checkpoint_does_not() -> None:
    held = ReservedResources({"CPU": 1}, "ab" * 18, [0, 1])
    critic = CriticPool("rm", num_ranks=2, resources=held)
    assert critic.resources is held
    assert type(critic.plain()["init_args"]["resources"]) is dict


def test_reserved_resources_are_plain_values_that_other_processes_can_have() -> None:
    there = pickle.loads(pickle.dumps(ReservedResources({"CPU": 2, "fast": 1}, "ab" * 18, [3, 4])))
    assert (dict(there), there.group, there.bundles) == ({"CPU": 2, "fast": 1}, "ab" * 18, (3, 4))
    options = actor_options(there, 1)
    assert (options["num_cpus"], options["resources"]) == (2, {"fast": 1})
    assert options["scheduling_strategy"].placement_group_bundle_index == 4
    with pytest.raises(PlacementError, match=r"holds resources for 2 engine\(s\), and 3 are to be started"):
        there.check_processes(3, "engine(s)")
