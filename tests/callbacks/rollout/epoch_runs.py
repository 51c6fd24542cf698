"""Small runs with several epochs over an iteration, for ``test_epochs.py``."""

from pathlib import Path
from typing import Any

import torch
from plain_sgd import PlainSGD
from rl_runs import RANK, RANKS, PlainGRPO, ahead, digits, on_all_ranks, weights

from callbacks.rollout import capped_runs
from callbacks.rollout.capped_runs import Growing, Watch, capped
from rlhfkit import OnlineDPOModule, PPOModule, RolloutCallback, SamplingSpec


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


class Pairs(PlainSGD, OnlineDPOModule):
    """Online DPO with SGD; it has a beta in place of the weight of a KL penalty."""

    def __init__(self, model: str, *, kl_coef: float = 0.0, **arguments: Any) -> None:
        super().__init__(model, beta=0.3, nll_coef=0.2, **arguments)


PAIRS_ARGUMENTS = {"module": Pairs}
PPO_ARGUMENTS = {"module": PPO, "module_arguments": {"critic_lr": 0.05, "kl_coef": 0.0}}


def fit(folder: Path, *, epochs: int = 3, resume: Any = None, cap: int | None = None, **arguments: Any) -> Any:
    """Two iterations of 8 prompts x 4 growing samples, two updates of two micro-batches each epoch unless told."""
    watch = arguments.pop("watch", None) or Watch()
    updates = arguments.pop("updates", 2)
    given: dict[str, Any] = {"module": GRPO, "max_epochs": 2, "callbacks": [watch, *arguments.pop("more", [])]}
    given |= {"accumulate_grad_batches": 4 // updates, "data_arguments": {"micro_batch_size": 8 // RANKS}}
    if cap is not None:
        given |= capped(cap, updates)
    sampling = SamplingSpec(group_size=4, max_new_tokens=16, temperature=arguments.pop("temperature", 1.0))
    parts = ahead(arguments.pop("max_staleness", 0))
    given["rollouts"] = RolloutCallback(digits, engine=Growing(), sampling=sampling, parts=parts)
    given["data_arguments"] |= {"epochs_per_iteration": epochs, **arguments.pop("data_arguments", {})}
    given |= on_all_ranks(arguments.pop("strategy", "auto"))
    trainer, module, data, rollouts = capped_runs.run(folder, **given | arguments)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer, module, watch, rollouts


ON_RANKS: dict[str, dict[str, Any]] = {
    "two updates, PPO": {"epochs": 2, "max_epochs": 1, **PPO_ARGUMENTS},
    "one update": {"epochs": 2, "max_epochs": 1, "updates": 1, "module_arguments": {"advantages": "remax_advantages"}},
    "capped": {"epochs": 2, "cap": 30},
    "two updates, pairs": {"epochs": 2, "max_epochs": 1, **PAIRS_ARGUMENTS},
    "capped, pairs": {"epochs": 2, "cap": 100, **PAIRS_ARGUMENTS},
}


def on_ranks(folder: Path, runs: dict[str, list[str]]) -> dict[str, Any]:
    """Entry point of a rank: straight runs under each strategy, and one that is resumed inside a later epoch."""
    report: dict[str, Any] = {}
    own = folder / f"rank{RANK}"
    for strategy, names in runs.items():
        for name in names:
            arguments, path = ON_RANKS[name] | {"strategy": strategy}, folder / f"{name}.ckpt"
            # DDP saves the micro-batches of rank 0 only, and cannot resume inside an iteration.
            stopped = strategy != "ddp" and name == "capped"
            straight = Watch(path, after=7) if stopped else Watch()
            trainer, module, watch, _ = fit(own, **arguments, watch=straight)
            most = max(map(max, watch.tokens))
            report[f"{strategy}, {name}"] = {"weights": watch.weights, "steps": trainer.global_step, "tokens": most}
            if not stopped:
                continue
            expected = weights(module)
            _, resumed, rest, _ = fit(own, **arguments, resume=str(path))
            report[f"{strategy}, {name}, resumed"] = {
                "same weights": all(torch.equal(tensor, expected[key]) for key, tensor in weights(resumed).items()),
                "same rows": rest.rows == straight.rows[-len(rest.rows) :],
                "batches": len(straight.rows) - len(rest.rows),
            }
    return report
