"""Runs whose training states leave the device while an engine generates that wants the memory."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from modules.on_policy.preparation.test_rewards import reward_model
from rl_runs import RANK, RANKS, digits, fit_run, on_all_ranks

from rlhfkit import GRPOModule, LocalEngine, PPOModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.callbacks import SharedDevices
from rlhfkit.modules.parts import RewardModel
from rlhfkit.protocols import RLHFStrategy

SPEC = SamplingSpec(group_size=4, max_new_tokens=6)


class Tenant(LocalEngine):
    """An engine on the ranks' devices that drops its weights when it sleeps, and writes down what lies beside it."""

    colocate = True

    def __init__(self, *, level: int = 2) -> None:
        super().__init__()
        self.level, self.asleep = level, False
        self.log: list[tuple[str, bool, bool]] = []
        """What happened, and whether weights and optimizer states were on the device."""
        self.rollouts: Any = None

    def note(self, what: str) -> None:
        trainer = self.rollouts._attached()
        phases = self.rollouts.part(SharedDevices)
        found = phases._of(trainer).state_bytes() if phases.offloads(trainer) else {"weights": 1, "optimizer": 1}
        trained = trainer.global_step > 0 or found["optimizer"] > 0
        self.log.append((what, bool(found["weights"]), bool(found["optimizer"]) or not trained))

    def load(self, weights: Any, version: int) -> None:
        self.note("load")
        super().load(weights, version)

    def wake(self) -> None:
        if self.asleep or not self.log or self.log[-1][0] != "wake":
            self.note("wake")
        self.asleep = False

    def generate(self, *args: Any, **kwargs: Any) -> list[Sample]:
        assert not self.asleep
        self.note("generate")
        return super().generate(*args, **kwargs)

    def sleep(self) -> None:
        if not self.asleep and self.version is not None:
            self.note("sleep")
            self.asleep = True
            self.version = self.version if self.level == 1 else None


class OwnMemory:
    """``from_pretrained`` maps weights of a CPU from their file, and that memory cannot be freed."""

    def configure_model(self) -> None:
        super().configure_model()  # type: ignore[misc]
        for parameter in self.parameters():  # type: ignore[attr-defined]
            parameter.data = parameter.data.clone()


class OwnGRPO(OwnMemory, GRPOModule):
    """GRPO."""


class OwnPPO(OwnMemory, PPOModule):
    """PPO: policy, critic, reference and reward model."""


class Look(L.Callback):
    """What was trained on, and all bits of weights at the end."""

    def __init__(self, rollouts: RolloutCallback) -> None:
        self.rollouts = rollouts
        self.tokens: list[list[int]] = []
        self.digest = ""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.tokens += [sample.token_ids.tolist() for sample in self.rollouts.samples]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        strategy, total = trainer.strategy, hashlib.sha256()
        for name, child in pl_module.named_children():
            sharded = isinstance(strategy, RLHFStrategy)
            state = strategy.consolidated_state_dict(name) if sharded else child.state_dict()  # type: ignore[attr-defined]
            for tensor in state.values():
                total.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
        self.digest = total.hexdigest()


def run(
    folder: Path,
    *,
    offload: bool | None,
    engine: Tenant | None = None,
    reward: Any = digits,
    module: Any = OwnGRPO,
    callbacks: Sequence[L.Callback] = (),
    parts: Sequence[Any] = (),
    **arguments: Any,
) -> dict[str, Any]:
    """Two iterations; what was trained on and what came of it."""
    engine = engine or Tenant()
    rollouts = RolloutCallback(reward, engine=engine, sampling=SPEC, parts=[SharedDevices(offload), *parts])
    engine.rollouts = rollouts
    look = Look(rollouts)
    torch.manual_seed(0)
    arguments |= {"callbacks": [*callbacks, look], "use_distributed_sampler": False}
    trainer, *_ = fit_run(folder, module=module, rollouts=rollouts, **arguments)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"tokens": look.tokens, "digest": look.digest, "metrics": metrics, "log": engine.log}


def on_ranks(folder: Path) -> None:
    """Entry point of a rank: PPO at ZeRO 3 with a reference and a reward model, without and with offloading."""
    folder = folder / f"rank{RANK}"
    without, found = (
        run(
            folder,
            offload=offload,
            module=OwnPPO,
            module_arguments={"parts": [RewardModel(reward_model(folder)).plain()], "kl_coef": 0.01, "lr": 1e-3},
            data_arguments={"micro_batch_size": 8 // RANKS},
            **on_all_ranks("rlhf_zero3"),
        )
        for offload in (False, True)
    )
    assert (found["tokens"], found["digest"]) == (without["tokens"], without["digest"])
    assert found["metrics"]["memory/train_offloaded_gib"] > 4 * found["metrics"]["memory/generate_gib"] > 0
