"""Plans on simulated machines, what each role is given, and errors that say what is missing.

Covers placement.py and ray_placement.py.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhfkit import CriticPool, Placement
from rlhfkit.ray_placement import PlacementError, ReservedResources, actor_options

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What Ray made of several plans on three machines of four GPUs and one without any."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    script = Path(__file__).with_name("placed_cluster.py")
    process = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=800, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    report: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return report


def test_ranks_are_packed_and_engines_spread_over_the_other_machines(found: dict[str, Any]) -> None:
    plan = found["spread"]
    assert plan["machines"] == {"trainer": [4], "engines": [1, 2], "reference": [2], "reward": [2], "critic": []}
    assert not set(plan["names"]["trainer"]) & {*plan["names"]["engines"], *plan["names"]["reference"]}
    assert plan["processes"] == {"trainer": 4, "engines": 3, "reference": 2, "reward": 2, "critic": 4}


def test_each_role_gets_what_its_constructor_takes(found: dict[str, Any]) -> None:
    half = {"GPU": 0.5, "CPU": 0.5}
    assert found["reference"] == [2, half]
    assert found["reward"] == [2, half, "rm"]  # the critic is the name of a child's model
    assert found["engines"] == [3, False, 3]
    assert found["ranks"]["launcher"] == "ray"
    assert found["ranks"]["devices"] == 4
    assert found["plain"]  # a checkpoint keeps numbers, not places


@pytest.mark.smoke
def test_actors_start_where_the_plan_says(found: dict[str, Any]) -> None:
    assert found["there"] == [True, True, True]


def test_ranks_that_no_machine_has_room_for_are_divided_evenly(found: dict[str, Any]) -> None:
    assert found["two_machines"]["machines"] == {"trainer": [4, 4], "engines": [1]}
    assert found["two_machines"]["devices"] == 4
    assert found["four_gpus"] == 1
    assert "has 2 process(es) with a GPU each, and 4 GPU(s) are held" in found["wrong_size"]


def test_resources_may_have_names_of_their_own_and_ranks_be_outside_ray(found: dict[str, Any]) -> None:
    assert found["named"]["machines"] == {"trainer": [1], "reward": [1]}
    assert "not started by Ray" in found["named"]["table"]


def test_a_plan_that_cannot_be_met_says_what_is_missing_and_what_there_is(found: dict[str, Any]) -> None:
    assert found["too_many"].startswith(
        "the plan needs 14 GPU(s) (trainer 8, engines 4, reference 2), and Ray's cluster has 12 ("
    )
    assert ": 2 are missing." in found["too_many"]
    assert "a process of engines needs 8 GPU(s) on one machine, and the largest has 4" in found["too_large"]
    assert "could not place 4 process(es) of trainer of 1 GPU + 1 CPU (STRICT_PACK) within 1 s" in found["taken"]
    assert "2 GPU + 6 CPU" in found["taken"]
    assert found["all"]["machines"] == {"trainer": [4, 4, 4]}


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
