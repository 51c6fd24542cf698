"""Who has the memory of shared devices: the order of phases, equal runs, and errors.

Whatever uses the states that are away, such as a reward that calls the policy: ``test_training_states.py``; validation
during training: ``rollout/remote/test_rank_memory.py``.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import additions, digits, only_odd, setup_run
from strategies import ranks

from rlhfkit import DynamicSampling, LocalEngine, RolloutCallback
from rlhfkit.callbacks.rollout.parts.shared_devices import SharedDevices

from .offload_runs import SPEC, OwnGRPO, Tenant, run

SAME = ("tokens", "digest")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the model, the prompts and a run without offloading."""
    return tmp_path_factory.mktemp("phases")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return run(folder, offload=False)


def test_phases_follow_one_another_and_the_run_is_the_same(
    folder: Path, plain: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With real engines of both levels: ``rollout/remote/test_rank_memory.py``."""
    found = run(folder, offload=True, engine=Tenant(level=1))
    assert all(found[name] == plain[name] for name in SAME)
    # What the engine does, whether weights are on the device, and whether optimizer states are.
    iteration = [("load", True, False), ("wake", False, False), ("generate", False, False), ("sleep", False, False)]
    assert found["log"][0] == ("load", True, True)  # there are no optimizer states before the first update
    assert [what for what, *_ in found["log"][1:4]] == ["wake", "generate", "sleep"]
    assert not any(weights for _, weights, _ in found["log"][1:4])
    assert found["log"][4:] == iteration
    metrics = found["metrics"]
    assert not any(name.startswith("memory/") for name in plain["metrics"])
    assert metrics["memory/generate_gib"] == 0
    assert metrics["memory/train_offloaded_gib"] == metrics["memory/learn_gib"] > 3 * 300_000 / 2**30
    assert metrics["time/reload"] > 0
    assert "needed training states" not in caplog.text  # they are back before


def test_trainer_validate_leaves_the_weights_on_the_device(folder: Path, tmp_path: Path) -> None:
    found = []
    for offload in (False, True):
        engine = Tenant()
        engine.rollouts = rollouts = RolloutCallback(
            digits, engine=engine, sampling=SPEC, parts=[SharedDevices(offload)]
        )
        data = {"rollout_batch_size": 8, "validation_data": additions(20)}
        trainer, module, data, _ = setup_run(folder, module=OwnGRPO, rollouts=rollouts, data_arguments=data)
        (metrics,) = trainer.validate(module, data, verbose=False)
        assert all(p.untyped_storage().nbytes() for p in module.parameters())
        found.append((metrics["val/reward"], float(module.token_logprobs(torch.arange(8)[None]).sum())))
    assert found[0] == found[1]


def test_rounds_of_dynamic_sampling_are_one_generating_phase(folder: Path) -> None:
    expected, found = (
        run(folder, offload=offload, reward=only_odd, parts=[DynamicSampling(max_rounds=8)])
        for offload in (False, True)
    )
    assert found["metrics"]["rollout/accepted_fraction"] < 1.0  # so one round was not enough
    assert all(found[name] == expected[name] for name in SAME)
    assert [what for what, *_ in found["log"]] == ["load", "wake", "sleep"] * 2


def test_after_an_error_the_states_are_back(folder: Path) -> None:
    """The engine is closed first, so that there is room."""

    class Module(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.module = pl_module

    def broken(samples: Any) -> Any:
        raise ArithmeticError("the reward is broken")

    kept = Module()
    with pytest.raises(ArithmeticError):
        run(folder, offload=True, reward=broken, callbacks=[kept])
    assert all(p.untyped_storage().nbytes() for p in kept.module.parameters())
    assert kept.module.token_logprobs(torch.arange(8)[None]).isfinite().all()


@pytest.mark.distributed
def test_two_ranks_learn_the_same(tmp_path: Path) -> None:
    """PPO with an engine each for policy and critic, a reference and a reward model; DDP is in ``rollout/remote``."""
    ranks.run("callbacks.rollout.offload_runs:on_ranks", 2, tmp_path)


def test_by_default_states_move_only_on_shared_gpus(tmp_path: Path) -> None:
    trainer, *_ = setup_run(tmp_path)

    def offloads(engine: LocalEngine, given: bool | None) -> bool:
        part = SharedDevices(given)
        RolloutCallback(digits, engine=engine, parts=[part])
        return part.offloads(trainer)

    assert not offloads(Tenant(), None)  # on a CPU there is nothing to gain
    trainer.strategy._root_device = torch.device("cuda", 0)
    assert offloads(Tenant(), None)
    assert not offloads(Tenant(), False)
    assert not offloads(LocalEngine(), None)
    assert offloads(LocalEngine(), True)
