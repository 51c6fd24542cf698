"""Steps that the recipes share: a mediocre model to start from, scored completions, fine-tuning, and accuracy.

The recipes are rejection_sampling.py, iterative_dpo.py, conditional_sft.py and decision_transformer.py; each is a loop
of generate, score, select and train, on the additions of ../arithmetic.py.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import datasets
import lightning as L
import torch
import transformers

from rlhfkit import Optimization, SamplingSpec, SFTDataModule, SFTModule
from rlhfkit.cli.generate import generate
from rlhfkit.cli.jsonl import read_lines
from rlhfkit.cli.score import score
from rlhfkit.rewards import exact_match

sys.path.insert(0, str(Path(__file__).parents[1]))  # of the tutorials

import arithmetic
from grpo_arithmetic import quiet_trainer as quiet_trainer
from grpo_arithmetic import supervised_start


class Start(NamedTuple):
    """The start of a recipe."""

    folder: Path
    """Where everything is written."""
    model: Path
    """Gets about 60% of the additions right."""
    questions: list[dict[str, Any]]
    """For training: rows with ``question`` and ``answer``."""
    heldout: list[dict[str, Any]]
    """The same columns; never trained on."""
    samples: int
    """Completions per question."""
    rounds: int
    """How often to sample and train."""


def start(about: str | None, arguments: Sequence[str] | None, *, samples: int = 8, rounds: int = 1) -> Start:
    """Read the command line; make the data, and a model by short supervised fine-tuning."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/recipes"), help="where everything is written")
    parser.add_argument("--samples", type=int, default=samples, help="completions per question")
    parser.add_argument("--rounds", type=int, default=rounds, help="how often to sample and train")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)  # a second thread slows down a model this small
    L.seed_everything(options.seed, verbose=False)
    folder = options.folder
    if not (folder / "sft").exists():
        supervised_start(arithmetic.make(folder, options.seed))
    rows = [read_lines(folder / name) for name in ("train.jsonl", "heldout.jsonl")]
    return Start(folder, folder / "sft", *rows, options.samples, options.rounds)


def scored(model: Path, rows: Sequence[Any], folder: Path, sampling: SamplingSpec) -> list[dict[str, Any]]:
    """Generate answers to the questions of the rows, and score them: 1 if right, 0 if not."""
    samples, judged = folder / "samples.jsonl", folder / "scored.jsonl"
    generate(str(model), rows, samples, prompt="question", sampling=sampling, overwrite=True, progress=False)
    score(samples, judged, reward=exact_match, prompt="question", answer="answer", overwrite=True, progress=False)
    return read_lines(judged)


def accuracy(model: Path, rows: Sequence[Any], folder: Path) -> float:
    """Percentage of questions that the model answers right with greedy sampling."""
    greedy = SamplingSpec(group_size=1, max_new_tokens=5, temperature=0.0)
    return 100 * fmean(line["reward"] for line in scored(model, rows, folder, greedy))


def fine_tune(model: Path, rows: Sequence[Any], output: Path, *, epochs: int) -> Path:
    """Supervised fine-tuning on the rows' questions and completions; returns the folder of the new model."""
    module = SFTModule(str(model), lr=1e-3, optimization=Optimization(warmup_steps=10, lr_schedule="linear"))
    data = SFTDataModule(rows, prompt="question", completion="completion", micro_batch_size=128, max_length=64)
    quiet_trainer(output, max_epochs=epochs).fit(module, data)
    return module.save_pretrained(output)
