"""Small runs with several epochs over an iteration, for ``test_epochs.py``."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from rl_runs import PlainGRPO, weights

from callbacks.rollout import capped_runs
from callbacks.rollout.capped_runs import Watch, capped
from rlhfkit import PPOModule
from rlhfkit.rollout import ModuleWeights

RANK, RANKS = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class OldLogprobs:
    """A module that keeps what its loss takes for the log-probs before the iteration, by update and sample."""

    old: list[tuple[int, int, int, torch.Tensor]]

    def loss(self: Any, batch: Any, out: Any) -> Any:
        if torch.is_grad_enabled() and self._trainer is not None:
            self.old = getattr(self, "old", [])
            old = self.old_logprobs(batch, out).where(batch.action_mask, 0.0).detach()
            for row, (group, sample) in enumerate(zip(batch.group.tolist(), batch.sample_index.tolist(), strict=True)):
                if bool(batch.action_mask[row].any()):
                    end = int(batch.attention_mask[row].sum()) - 1
                    self.old.append((self.trainer.global_step, group, sample, old[row, :end].cpu()))
        return super().loss(batch, out)  # type: ignore[misc]


class GRPO(OldLogprobs, PlainGRPO):
    """GRPO with SGD."""


class PPO(OldLogprobs, PlainSGD, PPOModule):
    """PPO with SGD."""


PPO_ARGUMENTS = {"module": PPO, "module_arguments": {"critic_lr": 0.05, "kl_coef": 0.0}}


def fit(folder: Path, *, epochs: int = 3, resume: Any = None, cap: int | None = None, **arguments: Any) -> Any:
    """Two iterations of 8 prompts x 4 growing samples, two updates of two micro-batches each epoch unless told."""
    os.environ["WORLD_SIZE"] = str(RANKS)  # Lightning deletes it when a fit ends
    watch = arguments.pop("watch", None) or Watch()
    updates = arguments.pop("updates", 2)
    given: dict[str, Any] = {"module": GRPO, "max_epochs": 2, "callbacks": [watch, *arguments.pop("more", [])]}
    given |= {"accumulate_grad_batches": 4 // updates, "data_arguments": {"micro_batch_size": 8 // RANKS}}
    if cap is not None:
        given |= capped(cap, updates)
    given["data_arguments"] |= {"epochs_per_iteration": epochs, **arguments.pop("data_arguments", {})}
    trainer, module, data, rollouts = capped_runs.run(folder, **given | arguments)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer, module, watch, rollouts


def on_ranks(folder: Path, strategies: list[str]) -> dict[str, Any]:
    """Entry point of a rank: straight runs, and one resumed inside a later epoch."""
    report: dict[str, Any] = {}
    own = folder / f"rank{RANK}"
    for strategy in strategies:
        shared = {"strategy": strategy, "devices": RANKS, "use_distributed_sampler": False}
        for name, arguments in {
            "two updates": {"epochs": 2},
            "two updates, PPO": {"epochs": 2, **PPO_ARGUMENTS},
            "one update": {"epochs": 2, "updates": 1},
            "capped": {"epochs": 2, "cap": 30},
        }.items():
            trainer, module, watch, _ = fit(own, **shared, **arguments)
            report[f"{strategy}, {name}"] = {
                "weights": watch.weights,
                "steps": trainer.global_step,
                "rows": [sorted(rows) for rows in watch.rows],
            }
        if strategy == "ddp":
            continue  # saves the micro-batches of rank 0 only, and cannot resume inside an iteration
        for name, after in (("two updates", 7), ("one update", 6)):
            arguments = {"epochs": 2, "updates": 1 if name == "one update" else 2}
            path = folder / f"{name}.ckpt"
            _, module, straight, _ = fit(own, **shared, **arguments, watch=Watch(path, after=after))
            expected = weights(module)
            _, resumed, rest, _ = fit(own, **shared, **arguments, resume=str(path))
            report[f"{strategy}, {name}, resumed"] = {
                "same weights": all(torch.equal(tensor, expected[key]) for key, tensor in weights(resumed).items()),
                "same rows": rest.rows == straight.rows[-len(rest.rows) :],
                "batches": len(rest.rows),
            }
    return report


def model_weights(module: L.LightningModule) -> list[float]:
    """A number for each of the policy's weights."""
    return [float(tensor.double().abs().sum()) for _, tensor in ModuleWeights(module.policy)]
