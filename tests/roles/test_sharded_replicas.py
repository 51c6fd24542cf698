"""A replica that is divided over several actors against the model in this process.

Covers replicas/sharded.py and replicas/shard.py.
"""

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.modules.on_policy.preparation.placed_models import wait_for
from rlhfkit.ray_resources import ReservedResources
from rlhfkit.roles import ModelPool, ModelPoolError
from rlhfkit.roles.replicas.shard import ShardProcess
from rlhfkit.rollout import ModuleWeights

from .test_model_pool import FLOAT32, expected, one_by_one, process_of, rows


def ranks_of(pool: ModelPool) -> list[ShardProcess]:
    """The ranks of the first replica."""
    import ray

    found: list[ShardProcess] = ray.get(pool._replicas[0].actor.processes.remote())
    return found


def wait_until_ended(processes: Sequence[ShardProcess]) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{one.pid}").exists() for one in processes):
        assert time.monotonic() < deadline, f"of {processes} some still run"
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.distributed
def test_a_divided_replica_gives_the_same_numbers_moves_and_is_replaced_as_a_whole(
    tmp_path: Path, ray_session: None
) -> None:
    folder, batch = tiny_model(tmp_path / "model"), rows()
    policy, mixed = load_causal_lm(str(tiny_model(tmp_path / "policy", seed=1))), load_causal_lm(str(folder)).eval()
    pool = ModelPool(str(folder), ranks_per_replica=2)
    pool.start("logprobs", **FLOAT32)
    try:
        first = ranks_of(pool)
        whole = sum(parameter.numel() for parameter in mixed.parameters())
        assert len(first) == 2
        assert all(whole / 2 <= one.parameters < 0.6 * whole for one in first)
        found = pool.submit(batch, one_by_one(batch)[:3]).result()  # in the second round one rank has nothing
        wanted = expected(folder, batch)
        wanted[3] = 0
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)

        pool.follow(ModuleWeights(policy), 0.25, dtype=torch.float32)
        with torch.no_grad():
            for old, new in zip(mixed.parameters(), policy.parameters(), strict=True):
                old.lerp_(new, 0.25)
            wanted = policy_output(mixed, batch, batch.action_mask).logprobs
        os.kill(first[1].pid, signal.SIGKILL)
        found = wait_for(pool, pool.submit(batch, one_by_one(batch)).result)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        second = ranks_of(pool)
        wait_until_ended(first)
        assert len(second) == 2

        os.kill(process_of(pool._replicas[0]), signal.SIGKILL)  # what Ray starts again starts ranks of its own
        found = wait_for(pool, pool.submit(batch, one_by_one(batch)).result)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        wait_until_ended(second)
        third = ranks_of(pool)
        assert not pool._replicas[0].lost

        unknown = dataclasses.replace(batch, input_ids=batch.input_ids + 10_000)
        for _ in range(2):
            with pytest.raises(ModelPoolError, match=r"could not compute .*IndexError: index out of range"):
                wait_for(pool, pool.submit(unknown, one_by_one(batch)[:1]).result)
    finally:
        pool.close()
    wait_until_ended(third)


def test_resources_that_a_placement_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="a Placement holds resources for replicas of one actor each"):
        ModelPool("folder", ranks_per_replica=2, resources=ReservedResources({"CPU": 1}, "group", [0]))
