"""The recipes of docs/reference/placement.md, trained for two iterations on the suite's Ray; ranks on held cores."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from rl_runs import ahead, fit_run
from shared_pool import SharedPool
from strategies import ray_cases
from tiny_models import tiny_model

from rlhfkit import LocalEngine, ModelPool, Placement, PPOModule, RolloutCallback, SamplingSpec, VLLMPool
from rlhfkit.models import load_scalar_model, load_tokenizer
from rlhfkit.modules.parts import Reference, RewardModel
from rlhfkit.strategies.ray.launcher import RayLauncher

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

PART = {"processes": 1, "resources": {"CPU": 0.25}}
"""Of the few cores of the suite's Ray."""
WITH: Any = "with trainer"
ENGINE: dict[str, Any] = {"kv_cache_gib": 1 / 16, "max_model_len": 64, "start_timeout": 600}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("recipes")
    tiny_model(place / "model")
    load_scalar_model(str(place / "model"), head_std=0.1).save_pretrained(place / "reward")
    load_tokenizer(str(place / "model")).save_pretrained(place / "reward")
    return place


@pytest.fixture(scope="module")
def apart(folder: Path, ray_session: None) -> Iterator[tuple[Placement, VLLMPool]]:
    """The plan that separates all, and its engine, which outlives the trainers of several tests."""
    placement = Placement(trainer=1, engines=PART, reference=PART, reward=PART, critic=WITH)
    engine = placement.engines(**ENGINE)
    close, engine.close = engine.close, MethodType(SharedPool.close, engine)  # type: ignore[method-assign]
    yield placement, engine
    close()
    placement.close()


def learn(folder: Path, placement: Placement, engine: Any, **rollouts: Any) -> PPOModule:
    """PPO with every role where the plan says; the policy must have moved."""
    reward, reference = placement.reward(str(folder / "reward")), placement.reference(str(folder / "model"))
    critic = placement.critic(str(folder / "reward"))
    arguments = {"critic": critic, "parts": [RewardModel(reward), Reference(reference)]}
    callback = RolloutCallback(engine=engine, sampling=SamplingSpec(group_size=4, max_new_tokens=8), **rollouts)
    trainer, module, _ = fit_run(
        folder, module=PPOModule, module_arguments={"kl_coef": 0.1, **arguments}, rollouts=callback, max_epochs=2
    )
    assert trainer.global_step == 4
    assert hasattr(module, "reference") != isinstance(reference, ModelPool)
    assert hasattr(module, "reward_model") != isinstance(reward, ModelPool)
    return module  # type: ignore[return-value]


def test_all_roles_with_the_trainer_need_no_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray.init")
    placement = Placement(trainer=1, engines=WITH, reference=WITH, reward=WITH, critic=WITH)
    engines = placement.engines()
    assert engines.colocate  # needs a GPU; on a CPU the engine in the ranks' processes takes its place
    learn(folder, placement, LocalEngine())
    assert {row.role: row.note for row in placement.plan}["reference"] == "with trainer: in the ranks"
    placement.close()


@pytest.mark.parametrize("recipe", ["separate", "hybrid", "async"])
def test_roles_apart_from_the_trainer_or_with_it_as_the_recipe_says(
    folder: Path, apart: tuple[Placement, VLLMPool], recipe: str
) -> None:
    placement, engine = apart
    if recipe != "separate":
        placement = Placement(trainer=1, engines=PART, reference=WITH, reward=PART, critic=WITH)
    module = learn(folder, placement, engine, parts=ahead(int(recipe == "async")))
    assert isinstance(module.scorer.by_name[""], ModelPool)
    inside = {row.role for row in placement.plan if not row.machines}
    assert inside == ({"critic"} if recipe == "separate" else {"critic", "reference"})
    if recipe != "separate":
        placement.close()


def test_ranks_of_ray_start_on_what_the_plan_holds(tmp_path: Path, ray_session: None) -> None:
    import ray

    placement = Placement(trainer={"processes": 2, "resources": {"CPU": 0.25}}, launcher="ray")
    given = placement.ranks()
    assert (given["launcher"], given["num_nodes"], placement.devices) == ("ray", 1, 2)
    before = len(ray.util.placement_group_table())
    kind = ray_cases.launcher(RayLauncher, resources_per_rank=given["resources_per_rank"])
    kind.launch(ray_cases.note_place, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["place_0", "place_1"]
    assert len(ray.util.placement_group_table()) == before  # no group of the launcher's own
    held = given["resources_per_rank"].placement_group()
    assert ray.util.placement_group_table(held)["state"] == "CREATED"  # for the next run
    placement.close()
