"""Small runs whose samples grow and are trained on in several epochs or in micro-batches with a cap of tokens.

For ``test_epochs.py`` and ``test_micro_batching.py``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from plain_sgd import PlainSGD
from rl_runs import RANK, RANKS, Iterations, PlainGRPO, ahead, digits, fit_run, on_all_ranks

from rlhfkit import LocalEngine, OnlineDPOModule, PPOModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.models.forward import forward_of, unwrap


class Growing(LocalEngine):
    """Cuts its answers at lengths that differ within a group and grow from iteration to iteration."""

    def generate(self, *arguments: Any, iteration: int, **more: Any) -> list[Sample]:
        samples = super().generate(*arguments, iteration=iteration, **more)
        for sample in samples:
            kept = 1 + (7 * sample.prompt.index + 3 * sample.sample_index + 5 * iteration) % (3 + 5 * iteration)
            for name in ("token_ids", "logprobs", "versions"):
                setattr(sample, name, getattr(sample, name)[:kept])
        return samples


class OldLogprobs:
    """A module that keeps what its loss takes for the log-probs before the iteration, by update and sample."""

    old: list[tuple[int, int, int, torch.Tensor]]
    at_ratio_one: set[int]
    """Updates whose ratios are exactly 1, as there are no other log-probs."""

    def loss(self: Any, batch: Any, out: Any) -> Any:
        if torch.is_grad_enabled() and self._trainer is not None:
            self.old, self.at_ratio_one = getattr(self, "old", []), getattr(self, "at_ratio_one", set())
            if batch.old_logprobs is None:
                self.at_ratio_one.add(self.trainer.global_step)
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


class Watch(Iterations):
    """What Lightning and the micro-batches say after each micro-batch.

    Saves a checkpoint, if it has a path, after the first micro-batch of the second half of an iteration.
    """

    def __init__(self, path: Path | None = None, iteration: int = 1) -> None:
        super().__init__()
        self.path, self.iteration = path, iteration
        self.sizes: list[list[int]] = []
        """Tokens that the forward pass computes, for each iteration."""
        self.rows: list[list[tuple[int, int]]] = []
        self.counts: list[tuple[float | None, int]] = []
        self.accumulated: list[int] = []
        self.lengths: list[int] = []
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.bars: list[float] = []
        self.validated_after: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 or not self.sizes:
            self.sizes.append([])
            self.accumulated.append(trainer.accumulate_grad_batches)
            self.lengths.append(trainer.num_training_batches)
            if trainer.progress_bar_callback is not None:
                self.bars.append(trainer.progress_bar_callback.train_progress_bar.total)
        self.sizes[-1].append(forward_of(unwrap(pl_module.policy)).inputs(batch).arguments["input_ids"].numel())
        self.rows.append(list(zip(batch.group.tolist(), batch.sample_index.tolist(), strict=True)))
        self.counts.append((batch.step_tokens, batch.step_micro_batches))
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if (trainer.current_epoch, batch_idx) == (self.iteration, trainer.num_training_batches // 2) and self.path:
            trainer.save_checkpoint(self.path)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_after.append((trainer.current_epoch, trainer.global_step))


PPO_ARGUMENTS = {"module": PPO, "module_arguments": {"critic_lr": 0.05}}


def fit(
    folder: Path,
    *,
    epochs: int = 1,
    cap: int | None = None,
    updates: int = 2,
    group_size: int = 4,
    temperature: float = 1.0,
    max_staleness: int = 0,
    strategy: str = "auto",
    watch: Watch | None = None,
    callbacks: Sequence[L.Callback] = (),
    **arguments: Any,
) -> tuple[L.Trainer, Any, Watch]:
    """Three iterations of 8 prompts x 4 growing samples in two updates of two micro-batches, unless told.

    Args:
        folder: Where the model is.
        epochs: Over each iteration.
        cap: Tokens of a micro-batch; ``None``: it has 8 samples.
        updates: Of each epoch.
        group_size: Samples of a prompt.
        temperature: They are sampled at.
        max_staleness: Iterations that are sampled ahead.
        strategy: Of several ranks.
        watch: Another one.
        callbacks: More of them.
        **arguments: Of :func:`rl_runs.fit_run`.
    """
    watch = watch or Watch()
    data: dict[str, Any] = {"micro_batch_size": 8 // RANKS}
    if cap is not None:
        data = {"micro_batch_size": None, "max_tokens_per_micro_batch": cap, "updates_per_iteration": updates}
    data |= {"epochs_per_iteration": epochs} | arguments.pop("data_arguments", {})
    sampling = SamplingSpec(group_size=group_size, max_new_tokens=16, temperature=temperature)
    given = {
        "module": GRPO,
        "module_arguments": {"lr": 0.05, "kl_coef": 0.01} | arguments.pop("module_arguments", {}),
        "max_epochs": 3,
        "accumulate_grad_batches": 4 // updates if cap is None else 1,
        "rollouts": RolloutCallback(digits, engine=Growing(), sampling=sampling, parts=ahead(max_staleness)),
    }
    trainer, module, _ = fit_run(
        folder, callbacks=[watch, *callbacks], data_arguments=data, **given | on_all_ranks(strategy) | arguments
    )
    return trainer, module, watch


ON_RANKS: dict[str, dict[str, Any]] = {
    "two updates, PPO": {"epochs": 2, "max_epochs": 1, **PPO_ARGUMENTS},
    "one update": {"epochs": 2, "max_epochs": 1, "updates": 1, "module_arguments": {"advantages": "remax_advantages"}},
    "capped": {"epochs": 2, "cap": 30, "max_epochs": 2},
    "two updates, pairs": {"epochs": 2, "max_epochs": 1, "module": Pairs},
    "capped, pairs": {"epochs": 2, "cap": 100, "max_epochs": 2, "module": Pairs},
    # Updates of 9 samples, each alone in a micro-batch, of which two ranks have 5 each: one repeats a sample.
    "scattered": {"cap": 5, "group_size": 3, "data_arguments": {"rollout_batch_size": 6}, "max_epochs": 2},
}


def on_ranks(folder: Path, runs: list[list[str]]) -> list[dict[str, Any]]:
    """Entry point of a rank: runs, each the name of its strategy and that of its arguments."""
    report = []
    for strategy, name in runs:
        trainer, _, watch = fit(folder / f"rank{RANK}", **ON_RANKS[name], strategy=strategy)
        report.append(
            {
                "weights": watch.weights,
                "steps": trainer.global_step,
                "sizes": watch.sizes,
                "accumulated": watch.accumulated,
                "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            }
        )
    return report
