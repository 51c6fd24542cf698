"""Runs with a critic in the module and with ranks of its own, on one or several training ranks."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from rl_runs import setup_run
from tiny_models import tiny_model
from torch import Tensor, nn

from rlhfkit import PPOModule
from rlhfkit.models.heads import load_scalar_model
from rlhfkit.modules.parts import ValueLoss
from rlhfkit.roles import CriticPool, CriticPoolError
from rlhfkit.strategies.checkpoint.directory import read_manifest

from . import pool_ranks

CRITIC: dict[str, Any] = {"optimizer": "sgd", "optimizer_arguments": {"momentum": 0.9}}
"""The optimizer of ``MomentumPPO``."""
PLAIN: dict[str, Any] = {"lr": 0.05, "critic_lr": 0.05, "kl_coef": 0.05, "parts": [ValueLoss(clip=0.05).plain()]}


class MomentumPPO(PPOModule):
    """PPO with SGD with momentum for policy and critic."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=self.lr, momentum=0.9)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[float]:
    """The largest difference of each tensor."""
    assert first.keys() == second.keys()
    return [float((second[name] - tensor).abs().max()) for name, tensor in first.items()]


class SaveAt(L.Callback):
    """Saves a checkpoint after a batch, and exports the critic."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.exported, self.batch, self.count = path, path.with_name("exported"), batch, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        if self.count == self.batch:
            trainer.save_checkpoint(self.path)
            pl_module.save_pretrained(self.exported, child="critic")


class KillOf(L.Callback):
    """Sends a signal to the last rank of a critic after a batch; from then on what is asked of it has a limit."""

    def __init__(self, pool: CriticPool, batch: int, signal: int, limit: float = 3600.0) -> None:
        self.pool, self.batch, self.signal, self.limit, self.count = pool, batch, signal, limit, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        if self.count == self.batch:
            self.pool.request_timeout = self.limit
            if trainer.global_rank == 0:
                os.kill(self.pool.processes[-1][1], self.signal)


def train(folder: Path) -> dict[str, Any]:
    """Entry point of a training rank: differences between runs, and the error of one whose critic dies.

    Also what ``pool_ranks.py`` finds.
    """
    os.environ.pop("RAY_ADDRESS", None)
    own = folder / f"rank{os.environ['LOCAL_RANK']}"  # ranks must not write the same model
    for place in (own, folder / "reference" / own.name):  # before there is a process group, in which rank 0 alone saves
        tiny_model(place / "model")
    report: dict[str, Any] = {"reference": pool_ranks.train(folder / "reference"), "exported": 0.0}

    def run(critic: CriticPool | None, strategy: str, callbacks: Any = (), *, trained: Any = None, **fit: Any) -> Any:
        trainer, module, data, _ = setup_run(
            own,
            module=MomentumPPO,
            module_arguments=PLAIN | ({} if critic is None else {"critic": critic}),
            data_arguments={"micro_batch_size": 4},
            callbacks=callbacks,
            strategy=strategy,
            devices=2,
            use_distributed_sampler=False,
            gradient_clip_val=0.5,
        )
        trainer.fit(trained or module, datamodule=data, **fit)
        return module

    def pool(ranks: int, strategy: str) -> CriticPool:
        return CriticPool(
            str(folder / "rank0" / "model"), num_ranks=ranks, strategy=strategy, start_timeout=600.0, **CRITIC
        )

    def difference(module: Any, critic: CriticPool) -> float:
        found = differences(weights(expected.policy), weights(module.policy))
        if critic.weights is not None:
            found += differences(weights(expected.critic), critic.weights)
        return max(found)

    expected = run(None, "ddp")
    three = pool(3, "rlhf_zero3")
    report["ddp"] = difference(run(three, "ddp"), three)
    one, dying, again = (pool(1, "rlhf_zero2") for _ in range(3))
    save = SaveAt(folder / "saved.ckpt", batch=6)
    straight = run(one, "rlhf_zero1", [save])
    report["deepspeed"] = difference(straight, one)
    report["files"] = [name for name in read_manifest(save.path)["files"] if name.startswith("module/critic/")]
    straight.save_pretrained(folder / "after", child="critic")
    if one.weights is not None:
        exported = load_scalar_model(str(folder / "after"), new_head=False)
        report["exported"] = max(differences(weights(exported), one.weights))
    try:
        run(None, "rlhf_zero1", trained=straight)
    except CriticPoolError as error:
        report["second"] = str(error)
    try:
        run(dying, "rlhf_zero1", [KillOf(dying, 2, signal.SIGKILL)], ckpt_path=str(save.path))
    except CriticPoolError as error:
        report["error"] = str(error)
    resumed = run(again, "rlhf_zero1", ckpt_path=str(save.path))
    found = differences(weights(straight.policy), weights(resumed.policy))
    if again.weights is not None:
        found += differences(one.weights, again.weights)
    report["resumed"] = max(found)
    return report
