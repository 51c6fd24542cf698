"""Online DPO on additions: pairs of the policy's own answers, judged as they are made, for several seeds.

Each seed has its own data and its own mediocre start, which supervised fine-tuning makes as in the demo. The judge says
of two answers which one is nearer to the sum. ``python tutorials/online_dpo_arithmetic.py --seeds 0 1 2`` prints the
accuracy on held-out additions before and after, and draws the curves of all seeds.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import arithmetic
import lightning as L
import torch
from grpo_arithmetic import quiet_trainer, supervised_start

from rlhfkit import LocalEngine, OnlineDPOModule, Optimization, PromptDataModule, RolloutCallback, Sample, SamplingSpec
from rlhfkit.rewards import PairwiseReward, exact_match


def nearer(pairs: Sequence[tuple[Sample, Sample]]) -> list[float]:
    """Judge by the distance to the sum; what is no number is farthest."""
    distances = [[distance(sample) for sample in pair] for pair in pairs]
    return [0.5 + 0.5 * ((first < second) - (first > second)) for first, second in distances]


def distance(sample: Sample) -> float:
    """Of an answer to the sum."""
    text = sample.text.strip()
    return abs(int(text) - int(sample.prompt.answer)) if text.isdecimal() else float("inf")


class Accuracy(L.Callback):
    """Share of right answers among the samples of each iteration, and among the held-out additions."""

    def __init__(self, rollouts: RolloutCallback) -> None:
        self.rollouts = rollouts
        self.sampled: list[float] = []
        self.heldout: list[tuple[int, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the iteration."""
        self.sampled.append(100 * sum(exact_match(self.rollouts.samples)) / len(self.rollouts.samples))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the held-out additions."""
        samples = self.rollouts.validation_samples
        done = len(self.sampled) + trainer.state.fn.value.startswith("fit")  # this one is counted after its validation
        self.heldout.append((done, 100 * sum(exact_match(samples)) / len(samples)))


def train(folder: Path, seed: int, iterations: int) -> Accuracy:
    """One run."""
    arithmetic.make(folder, seed)
    L.seed_everything(seed, verbose=False)
    start = folder / "sft"
    if not start.exists():
        supervised_start(folder)
    module = OnlineDPOModule(str(start), lr=2e-4, beta=0.1, nll_coef=0.2, optimization=Optimization(warmup_steps=10))
    data = PromptDataModule(
        str(folder / "train.jsonl"),
        validation_data=str(folder / "heldout.jsonl"),
        validation_split="train",
        prompt="question",
        answer="answer",
        rollout_batch_size=128,
        micro_batch_size=256,
        validation_batch_size=500,
        seed=seed,
    )
    rollouts = RolloutCallback(
        PairwiseReward(nearer),
        engine=LocalEngine(max_sequences=512),
        sampling=SamplingSpec(group_size=4, max_new_tokens=5, seed=seed),
    )
    watch = Accuracy(rollouts)
    trainer = quiet_trainer(
        folder, max_epochs=iterations, callbacks=[rollouts, watch], check_val_every_n_epoch=10, num_sanity_val_steps=0
    )
    trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    return watch


def draw(runs: dict[int, Accuracy], path: Path) -> None:
    """Plot the curves of all seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    sampled, heldout = figure.subplots(1, 2, sharey=True)
    for seed, run in runs.items():
        sampled.plot(range(1, len(run.sampled) + 1), run.sampled, linewidth=1, label=f"seed {seed}")
        heldout.plot(*zip(*run.heldout, strict=True), marker="o", markersize=3, label=f"seed {seed}")
    for axes, title in ((sampled, "samples of the iteration, right (%)"), (heldout, "held-out additions, right (%)")):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration")
        axes.grid(alpha=0.3)
    heldout.legend()
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the tutorial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/online_dpo"), help="where everything is written")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--iterations", type=int, default=60)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a second thread slows down a model this small
    runs = {}
    for seed in given.seeds:
        runs[seed] = train(given.folder / str(seed), seed, given.iterations)
        before, after = runs[seed].heldout[0][1], runs[seed].heldout[-1][1]
        print(
            f"seed {seed}: held-out accuracy before: {before:.1f}%, after: {after:.1f}% ({after - before:+.1f} points)"
        )
        (given.folder / f"{seed}.json").write_text(json.dumps([runs[seed].sampled, runs[seed].heldout]))
    draw(runs, given.folder / "curves.png")
    print(f"curves: {given.folder / 'curves.png'}")


if __name__ == "__main__":
    main()
