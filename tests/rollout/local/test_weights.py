"""Where ``LocalEngine`` has its weights: in the policy's memory where that is safe, else in its own."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from callbacks.rollout.offload_runs import Look
from rl_runs import digits, fit_run
from torch import nn

from rlhfkit import Ahead, LocalEngine, LoRA, Prompt, RolloutCallback, SamplingSpec
from rlhfkit.callbacks import SharedDevices
from rlhfkit.models import load_causal_lm
from rlhfkit.rollout import ModuleWeights
from rlhfkit.rollout.engine import DrainableWeights

SPEC = SamplingSpec(group_size=4, max_new_tokens=6)


def own_bytes(engine: LocalEngine) -> int:
    """Size of the memory that is the engine's own."""
    weights: Any = engine._parameters
    own = (weights._parameter(name) for name in weights.names - weights._borrowed.keys())
    return sum(one.nbytes for one in own if not one.is_meta)


class Memory(L.Callback):
    """Bytes that the engine has of its own, before each micro-batch."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.own: set[int] = set()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.own.add(own_bytes(self.engine))


def run(folder: Path, share_weights: bool | None, caplog: Any, *, precision: Any = "32-true", **of: Any) -> Any:
    """Two iterations with validation; what was learned, the engine's own bytes, and what it said."""
    engine = LocalEngine(share_weights=share_weights)
    rollouts = RolloutCallback(digits, engine=engine, sampling=SPEC, **of.pop("rollout_arguments", {}))
    look, memory = Look(rollouts), Memory(engine)
    torch.manual_seed(0)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="rlhfkit.rollout.local.engine"):
        fit_run(folder, rollouts=rollouts, callbacks=[look, memory], precision=precision, **of)
    said = {record.message for record in caplog.records if "the policy's weights" in record.message}
    return (look.tokens, look.digest), memory.own, said


def test_shared_weights_learn_the_same_without_memory_of_their_own(tmp_path: Path, caplog: Any) -> None:
    learned, own, said = run(tmp_path, None, caplog)
    assert own == {0}
    assert said == {"LocalEngine shares the memory of the policy's weights"}
    copied, own, said = run(tmp_path, False, caplog)
    assert learned == copied
    assert own == {sum(info.num_bytes for info in ModuleWeights(load_causal_lm(str(tmp_path / "model"))).metadata())}
    assert said == {"LocalEngine copies the policy's weights: share_weights=False"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"rollout_arguments": {"parts": [Ahead(1)]}}, "the engine generates while they are trained"),
        ({"rollout_arguments": {"parts": [SharedDevices(True)]}}, "they leave the device while it generates"),
        ({"module_arguments": {"lora": LoRA(rank=2), "lr": 1e-3}}, "they are merged with a LoRA adapter"),
        ({"precision": "bf16-mixed"}, "they are torch.float32, and the engine computes in torch.bfloat16"),
    ],
)
def test_weights_are_copied_where_they_cannot_be_shared(
    tmp_path: Path, caplog: Any, arguments: dict[str, Any], why: str
) -> None:
    _, own, said = run(tmp_path, None, caplog, max_epochs=1, **arguments)
    assert min(own) > 0
    (message,) = said
    assert message.startswith(f"LocalEngine copies the policy's weights: {why}")


@pytest.fixture
def policy(folder: Path) -> nn.Module:
    return load_causal_lm(str(folder)).eval()


def started(folder: Path, **arguments: Any) -> LocalEngine:
    engine = LocalEngine(**arguments)
    engine.start(str(folder), dtype=torch.float32)
    return engine


def lasting(policy: nn.Module) -> DrainableWeights:
    """As a RolloutCallback sends weights that do not change while the engine generates."""
    return DrainableWeights(ModuleWeights(policy), why_copied=None)


def tokens(engine: LocalEngine) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in engine.generate([Prompt(0, [5, 6, 7])], SPEC, iteration=0)]


def test_a_policy_that_was_trained_since_is_noticed(folder: Path, policy: nn.Module) -> None:
    """By everything that writes in place, as optimizers do; the next load makes it right."""
    engine = started(folder)
    engine.load(lasting(policy), 0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    sum(parameter.sum() for parameter in policy.parameters()).backward()
    optimizer.step()
    for use in (lambda: tokens(engine), lambda: engine.score([[1, 2, 3]])):
        with pytest.raises(RuntimeError, match=r"has changed since version 0 was loaded: sync the weights first"):
            use()
    engine.load(lasting(policy), 1)
    apart = started(folder, share_weights=False)
    apart.load(lasting(policy), 1)
    assert tokens(engine) == tokens(apart)


def test_a_copy_after_shared_weights_leaves_the_policy_alone(folder: Path, policy: nn.Module) -> None:
    """Whoever loads weights into the engine must not write into the policy."""
    engine = started(folder)
    engine.load(lasting(policy), 0)
    kept = [parameter.detach().clone() for parameter in policy.parameters()]
    other = load_causal_lm(str(folder)).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    engine.load(ModuleWeights(other), 1)
    assert all(map(torch.equal, policy.parameters(), kept))
    apart = started(folder)
    apart.load(ModuleWeights(other), 1)
    assert tokens(engine) == tokens(apart)


def test_sharing_can_be_demanded(folder: Path, policy: nn.Module) -> None:
    engine = started(folder, share_weights=True)
    with pytest.raises(RuntimeError, match=r"share_weights=True\) cannot share .* not loaded by a RolloutCallback"):
        engine.load(ModuleWeights(policy), 0)
    engine.load(lasting(policy), 0)
    assert own_bytes(engine) == 0
