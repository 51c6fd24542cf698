"""Models in Ray actors against the same models in this process.

Covers replica.py, pending_rows.py, replica_weights.py and modules/on_policy/preparation/placed_models.py.
One Ray session serves all tests.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.test_forward import experience
from rl_runs import setup_run, weights
from strategies import ranks
from tiny_models import tiny_model

from rlhfkit import Experience, GRPOModule, OnPolicyDistillationModule
from rlhfkit.models import load_causal_lm, load_scalar_model, load_tokenizer, policy_output, reward_output
from rlhfkit.modules.on_policy.preparation.placed_models import pool_result
from rlhfkit.roles import ModelPool, ModelPoolError
from rlhfkit.rollout import ModuleWeights

pytestmark = pytest.mark.ray


def rows() -> Experience:
    """Four sequences."""
    return experience([(4, 5), (2, 2), (6, 6), (3, 3)])


FLOAT32: Any = {"weights": torch.float32, "compute": torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def pool(folder: Path, ray_session: None) -> Iterator[ModelPool]:
    made = ModelPool(str(folder), num_replicas=2)
    made.start("logprobs", **FLOAT32)
    yield made
    made.close()


def expected(folder: Path, batch: Experience) -> torch.Tensor:
    with torch.no_grad():
        return policy_output(load_causal_lm(str(folder)).eval(), batch, batch.action_mask).logprobs


def one_by_one(batch: Experience) -> list[torch.Tensor]:
    return [torch.tensor([row]) for row in range(len(batch))]


def process_of(replica: Any) -> int:
    """The pid of a replica's actor."""
    import ray

    return ray.get(replica.actor.__ray_call__.remote(lambda _: os.getpid()))


def test_log_probs_are_those_of_the_model_in_this_process(folder: Path, pool: ModelPool) -> None:
    batch = rows()
    whole = pool.submit(batch, [torch.arange(len(batch))])
    some = pool.submit(batch, [torch.tensor([2]), torch.tensor([0])])
    torch.testing.assert_close(whole.result(), expected(folder, batch), rtol=0, atol=1e-6)
    wanted = torch.zeros(len(batch), 1)
    wanted[[0, 2]] = 1
    torch.testing.assert_close(some.result(), expected(folder, batch) * wanted, rtol=0, atol=1e-5)
    assert [replica.tokens for replica in pool._replicas] == [0, 0]


def test_replicas_share_the_requests(pool: ModelPool) -> None:
    asked = pool.submit(rows(), one_by_one(rows()))
    assert {replica.name for _, replica in asked._running.values()} == {one.name for one in pool._replicas}
    asked.result()


def test_a_replica_that_dies_is_started_again_and_nothing_is_lost(folder: Path, pool: ModelPool) -> None:
    batch = rows()
    os.kill(process_of(pool._replicas[0]), signal.SIGKILL)
    found = pool.submit(batch, one_by_one(batch)).result()
    torch.testing.assert_close(found, expected(folder, batch), rtol=0, atol=1e-5)
    assert not any(replica.lost for replica in pool._replicas)


def test_what_a_stuck_replica_was_asked_others_compute_and_without_any_it_is_an_error(
    folder: Path, ray_session: None
) -> None:
    batch, pool = rows(), ModelPool(str(folder), num_replicas=2, request_timeout=6.0, max_restarts=0)
    pool.start("logprobs", **FLOAT32)
    try:
        first, second = (process_of(replica) for replica in pool._replicas)
        os.kill(first, signal.SIGSTOP)
        started = time.monotonic()
        found = pool.submit(batch, one_by_one(batch)).result()
        assert time.monotonic() - started < 30
        torch.testing.assert_close(found, expected(folder, batch), rtol=0, atol=1e-5)
        assert [bool(replica.lost) for replica in pool._replicas] == [True, False]
        os.kill(second, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ModelPoolError, match=r"no replica of .* is left .*finished nothing for 6 s"):
            pool.submit(batch, one_by_one(batch)).result()
    finally:
        pool.close()


def test_a_model_that_cannot_be_loaded_or_placed_is_an_error_at_once(tmp_path: Path, ray_session: None) -> None:
    with pytest.raises(ModelPoolError, match=r"could not load .*missing"):
        ModelPool(str(tmp_path / "missing")).start("logprobs", **FLOAT32)
    with pytest.raises(ModelPoolError, match=r"1 of 1 replica\(s\) .* within 1 s: .*'GPU': 64"):
        ModelPool("model", resources={"GPU": 64}, start_timeout=1.0).start("logprobs", **FLOAT32)


def test_scores_are_those_of_the_reward_model_in_this_process(tmp_path: Path, folder: Path, ray_session: None) -> None:
    model = load_scalar_model(str(folder), head_std=0.1)
    model.save_pretrained(tmp_path / "reward")
    pool, batch = ModelPool(str(tmp_path / "reward")), rows()
    pool.start("reward", **FLOAT32)
    found = pool.submit(batch, one_by_one(batch)).result(columns=1)[:, 0]
    pool.close()
    with torch.no_grad():
        torch.testing.assert_close(found, reward_output(model.eval(), batch), rtol=0, atol=1e-5)


def test_a_run_with_both_models_elsewhere_is_the_run_with_children(tmp_path: Path, ray_session: None) -> None:
    trained = []
    tiny_model(tmp_path / "model")
    load_scalar_model(str(tmp_path / "model"), head_std=0.1).save_pretrained(tmp_path / "reward")
    load_tokenizer(str(tmp_path / "model")).save_pretrained(tmp_path / "reward")
    for elsewhere in (False, True):
        reward: Any = str(tmp_path / "reward")
        arguments = {
            "kl_coef": 0.1,
            "kl_in_reward": True,
            "ref_model_sync_steps": 1,
            "reward_model": ModelPool(reward) if elsewhere else reward,
        }
        if elsewhere:
            arguments["reference"] = ModelPool(str(tmp_path / "model"), num_replicas=2)
        trainer, module, data, _ = setup_run(tmp_path, module_arguments=arguments)
        trainer.fit(module, datamodule=data)
        assert hasattr(module, "reference") != elsewhere
        assert hasattr(module, "reward_model") != elsewhere
        trained.append(torch.cat([parameter.detach().flatten() for parameter in module.policy.parameters()]))
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=1e-6)
    restored = GRPOModule(**dict(module.hparams))
    assert restored.reference_pool is not None
    assert restored.reference_pool.plain() == arguments["reference"].plain()


def test_a_pool_follows_a_policy_and_restarted_replicas_get_what_it_has_become(
    folder: Path, tmp_path: Path, ray_session: None
) -> None:
    policy, batch = load_causal_lm(str(tiny_model(tmp_path / "policy", seed=1))), rows()
    mixed, pool = load_causal_lm(str(folder)).eval(), ModelPool(str(folder), num_replicas=2)
    pool.start("logprobs", **FLOAT32)
    early = pool.submit(batch, one_by_one(batch))  # its numbers would be those of the model before the move
    for alpha in (0.25, 1.0):
        pool.follow(ModuleWeights(policy), alpha, dtype=torch.float32)
        with torch.no_grad():
            for old, new in zip(mixed.parameters(), policy.parameters(), strict=True):
                old.lerp_(new, alpha)
            wanted = policy_output(mixed, batch, batch.action_mask).logprobs
        torch.testing.assert_close(pool_result(early, pool), wanted, rtol=0, atol=1e-6)
    os.kill(process_of(pool._replicas[0]), signal.SIGKILL)
    found = pool_result(pool.submit(batch, one_by_one(batch)), pool)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert not any(replica.lost for replica in pool._replicas)
    state = pool.moved_state()
    pool.close()
    resumed = ModelPool(str(folder))
    resumed.load_moved_state(state)
    resumed.start("logprobs", **FLOAT32)
    found = pool_result(resumed.submit(batch, [torch.arange(len(batch))]), resumed)
    resumed.close()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_student_learns_the_same_from_a_teacher_elsewhere(tmp_path: Path, ray_session: None) -> None:
    trained = []
    tiny_model(tmp_path / "model")
    for elsewhere in (False, True):
        teacher: Any = str(tiny_model(tmp_path / "teacher", seed=1))
        arguments = {"teacher": ModelPool(teacher) if elsewhere else teacher}
        trainer, module, data, _ = setup_run(
            tmp_path, module=OnPolicyDistillationModule, module_arguments=arguments, max_epochs=1
        )
        trainer.fit(module, datamodule=data)
        assert hasattr(module, "teacher") != elsewhere
        trained.append(weights(module))
    for name, tensor in trained[0].items():
        torch.testing.assert_close(trained[1][name], tensor, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="a divergence compares the teacher's probabilities of all tokens"):
        OnPolicyDistillationModule(str(tmp_path / "model"), ModelPool("teacher"), divergence="jsd")


@pytest.mark.distributed
def test_two_ranks_ask_the_replicas_that_rank_0_has_started(tmp_path: Path) -> None:
    for report in ranks.run("roles.pool_ranks:train", 2, tmp_path):
        assert report["held"] == [True, False]
        assert report["finite"]
        assert report["difference"] < 1e-6


def test_a_reference_that_nothing_asks_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"reference=ModelPool\(...\) is a model that nothing asks"):
        GRPOModule(str(folder), reference=ModelPool(str(folder)))
