"""Learning curves of several settings on the demo task, for each seed: held-out accuracy over iterations, as a picture.

    python benchmarks/learning_curves.py --picture docs/learning_curves.png

All start from the same fine-tuned model (``tutorials/grpo_arithmetic.py``) and train on as many samples in an
iteration. Prints one JSON line, and a table of means over the seeds. ``--only`` runs some of :data:`SETTINGS`.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import lightning as L
import torch

import rlhfkit
from rlhfkit import GRPOModule, LocalEngine, PromptDataModule, RolloutCallback, SamplingSpec, presets
from rlhfkit.rewards import exact_match

sys.path.insert(0, str(Path(__file__).parents[1] / "tutorials"))
import arithmetic
import grpo_arithmetic


@dataclass(frozen=True)
class Setting:
    """What differs from GRPO with 64 prompts of 8 samples and two updates of 256 in an iteration."""

    module: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 8
    cls: type[Any] = GRPOModule


SETTINGS = {
    "GRPO, 1 epoch": Setting(),
    "GRPO, 2 epochs": Setting(data={"epochs_per_iteration": 2}),
    "GRPO, 4 epochs": Setting(data={"epochs_per_iteration": 4}),
    "ReMax, 8 samples a prompt": Setting(presets.REMAX),
    "ReMax, 1 sample a prompt": Setting(presets.REMAX, {"rollout_batch_size": 512}, group_size=1),
}


class Accuracies(L.Callback):
    """Keeps the held-out accuracy after each validation."""

    def __init__(self) -> None:
        self.values: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keep the number of iterations so far, and the accuracy."""
        if not trainer.sanity_checking:
            self.values.append((trainer.current_epoch + 1, float(trainer.callback_metrics["val/reward"])))


def train(setting: Setting, folder: Path, start: Path, seed: int, iterations: int, every: int) -> dict[str, Any]:
    """Train one setting with one seed."""
    L.seed_everything(seed, verbose=False)
    module = setting.cls(str(start), **{"lr": 2e-4, "warmup_steps": 10, **setting.module})
    sizes = {"rollout_batch_size": 64, "micro_batch_size": 256, **setting.data}
    data = PromptDataModule(
        str(folder / "train.jsonl"),
        validation_data=str(folder / "heldout.jsonl"),
        validation_split="train",
        prompt="question",
        answer="answer",
        validation_batch_size=500,
        seed=seed,
        **sizes,
    )
    sampling = SamplingSpec(group_size=setting.group_size, max_new_tokens=5, seed=seed)
    rollouts = RolloutCallback(exact_match, engine=LocalEngine(max_sequences=512), sampling=sampling, alarms=[])
    accuracies = Accuracies()
    trainer = grpo_arithmetic.quiet_trainer(
        folder, max_epochs=iterations, check_val_every_n_epoch=every, num_sanity_val_steps=0,
        callbacks=[rollouts, accuracies],
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(module, data)
    return {"accuracy": accuracies.values, "updates": trainer.global_step, "seconds": time.perf_counter() - began}


def draw(results: dict[str, dict[str, Any]], before: float, path: Path) -> None:
    """Plot the mean of each setting's seeds, and the range between them."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, seeds in results.items():
        runs = [dict(run["accuracy"]) for run in seeds.values()]
        iterations = [0, *sorted(runs[0])]
        values = [[before, *(run[number] for number in iterations[1:])] for run in runs]
        columns = list(zip(*values, strict=True))
        (line,) = axes.plot(iterations, [mean(column) for column in columns], marker=".", label=name)
        low, high = [min(column) for column in columns], [max(column) for column in columns]
        axes.fill_between(iterations, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="iterations of 512 samples", ylabel="held-out accuracy, greedy")
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: accuracy after the last iteration, mean and deviation over the seeds, updates and seconds."""
    rows = ["| setting | updates | accuracy by seed | mean | deviation |", "|---|---|---|---|---|"]
    for name, seeds in results.items():
        last = [run["accuracy"][-1][1] for run in seeds.values()]
        spread = f"{100 * stdev(last):.1f}" if len(last) > 1 else ""
        each = ", ".join(f"{100 * value:.1f}" for value in last)
        updates = next(iter(seeds.values()))["updates"]
        rows.append(f"| {name} | {updates} | {each} | {100 * mean(last):.1f} % | {spread} |")
    return "\n".join(rows)


def main() -> None:
    """Train all settings and write what they have learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_curves"))
    parser.add_argument("--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="iterations between two validations")
    parser.add_argument("--picture", type=Path, default=None)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = arithmetic.make(arguments.folder)
    start = folder / "sft"
    if not start.exists():
        L.seed_everything(0, verbose=False)
        grpo_arithmetic.supervised_start(folder)
    before = grpo_arithmetic.heldout_accuracy(folder, start)
    results: dict[str, dict[str, Any]] = {}
    for seed in range(arguments.seeds):
        for name in arguments.only:
            run = train(SETTINGS[name], folder, start, seed, arguments.iterations, arguments.every)
            results.setdefault(name, {})[str(seed)] = run
            print(f"{name}, seed {seed}: {run['accuracy'][-1][1]:.3f} in {run['seconds']:.0f} s", file=sys.stderr)
            (folder / "results.json").write_text(json.dumps({"before": before, "results": results}))
    if arguments.picture is not None:
        draw(results, before, arguments.picture)
    print(f"before: {before:.1%}\n{table(results)}", file=sys.stderr)
    print(json.dumps({"version": rlhfkit.__version__, "before": before, "results": results}))


if __name__ == "__main__":
    main()
