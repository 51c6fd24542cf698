"""Small runs whose micro-batches have a cap of tokens and whose samples grow, for ``test_micro_batching.py``."""

from pathlib import Path
from typing import Any

import lightning as L
from rl_runs import RANK, PlainGRPO, digits, on_all_ranks, setup_run

from rlhfkit import LocalEngine, RolloutCallback, Sample, SamplingSpec
from rlhfkit.models.forward import forward_of, unwrap
from rlhfkit.rollout import ModuleWeights


class Growing(LocalEngine):
    """Cuts its answers at lengths that differ within a group and grow from iteration to iteration."""

    def generate(self, *arguments: Any, iteration: int, **more: Any) -> list[Sample]:
        samples = super().generate(*arguments, iteration=iteration, **more)
        for sample in samples:
            kept = 1 + (7 * sample.prompt.index + 3 * sample.sample_index + 5 * iteration) % (3 + 5 * iteration)
            for name in ("token_ids", "logprobs", "versions"):
                setattr(sample, name, getattr(sample, name)[:kept])
        return samples


class Watch(L.Callback):
    """What Lightning and the micro-batches say after each micro-batch; saves a checkpoint after one of them."""

    def __init__(self, path: Path | None = None, after: int = 0) -> None:
        self.path, self.after = path, after
        self.tokens: list[list[int]] = []
        """Those that the forward pass computes, for each iteration."""
        self.rows: list[list[tuple[int, int]]] = []
        self.counts: list[tuple[float | None, int]] = []
        self.accumulated: list[int] = []
        self.lengths: list[int] = []
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.bars: list[float] = []
        self.validated_after: list[tuple[int, int]] = []
        self.weights: list[float] = []
        """A number for each of the policy's, at the end."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 or not self.tokens:
            self.tokens.append([])
            self.accumulated.append(trainer.accumulate_grad_batches)
            self.lengths.append(trainer.num_training_batches)
            if trainer.progress_bar_callback is not None:
                self.bars.append(trainer.progress_bar_callback.train_progress_bar.total)
        self.tokens[-1].append(forward_of(unwrap(pl_module.policy)).inputs(batch).arguments["input_ids"].numel())
        self.rows.append(list(zip(batch.group.tolist(), batch.sample_index.tolist(), strict=True)))
        self.counts.append((batch.step_tokens, batch.step_micro_batches))
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if len(self.rows) == self.after:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = [float(tensor.double().abs().sum()) for _, tensor in ModuleWeights(pl_module.policy)]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_after.append((trainer.current_epoch, trainer.global_step))


def capped(tokens: int, updates: int = 2) -> dict[str, Any]:
    """Arguments of the data and of the Trainer."""
    sizes = {"micro_batch_size": None, "max_tokens_per_micro_batch": tokens, "updates_per_iteration": updates}
    return {"data_arguments": sizes, "accumulate_grad_batches": 1}


def run(folder: Path, *, data_arguments: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """8 prompts x 4 growing samples in two updates, three iterations unless told."""
    rollouts = RolloutCallback(digits, engine=Growing(), sampling=SamplingSpec(group_size=4, max_new_tokens=16))
    given = {"lr": 0.05, "kl_coef": 0.01} | arguments.pop("module_arguments", {})
    return setup_run(
        folder,
        **{"module": PlainGRPO, "module_arguments": given, "rollouts": rollouts, "max_epochs": 3} | arguments,
        data_arguments=data_arguments,
    )


def scattered(folder: Path, strategies: list[str]) -> dict[str, Any]:
    """Entry point of a rank: updates of 9 samples, each alone in a micro-batch, of which two ranks have 5 each.

    So one of them repeats a sample.
    """
    report: dict[str, Any] = {}
    for strategy in strategies:
        arguments = capped(5) | on_all_ranks(strategy)
        arguments["data_arguments"]["rollout_batch_size"] = 6
        rollouts = RolloutCallback(digits, engine=Growing(), sampling=SamplingSpec(group_size=3, max_new_tokens=16))
        watch = Watch()
        trainer, module, data, _ = run(
            folder / f"rank{RANK}", callbacks=[watch], rollouts=rollouts, max_epochs=2, **arguments
        )
        trainer.fit(module, data)
        report[strategy] = {
            "weights": watch.weights,
            "accumulated": watch.accumulated,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }
    return report
