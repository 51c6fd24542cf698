"""The demo: a small language model learns to add, first by supervised fine-tuning, then by reinforcement learning.

``make demo`` runs this. It makes a model and data (tutorials/arithmetic.py), fine-tunes the model until it gets some
additions right, and trains it with GRPO, whose only reward is whether the answer is right
(tutorials/grpo_arithmetic.yaml). At the end it prints the accuracy on held-out additions, before and after.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path

import arithmetic
import datasets
import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping

from rlhfkit import (
    GRPOModule,
    LocalEngine,
    PromptDataModule,
    RolloutCallback,
    RunReport,
    SamplingSpec,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.cli.main import run
from rlhfkit.rewards import exact_match

HERE = Path(__file__).parent


def supervised_start(folder: Path) -> Path:
    """Supervised fine-tuning, stopped as soon as the validation loss falls below 0.57 nats: a mediocre start."""
    module = SFTModule(str(folder / "model"), lr=2e-3, warmup_steps=50)
    data = SFTDataModule(
        str(folder / "demonstrations.jsonl"),
        validation_data=str(folder / "validation.jsonl"),
        validation_split="train",
        prompt="question",
        completion="answer",
        micro_batch_size=64,
        max_length=64,
    )
    mediocre = EarlyStopping("val/loss", stopping_threshold=0.57, patience=100)
    quiet_trainer(folder, max_epochs=60, callbacks=[mediocre]).fit(module, data)
    return module.save_pretrained(folder / "sft")


def heldout_accuracy(folder: Path, model: Path) -> float:
    """Share of held-out additions that a model gets right, greedily."""
    questions = str(folder / "heldout.jsonl")
    data = PromptDataModule(
        questions,
        validation_data=questions,
        validation_split="train",
        prompt="question",
        answer="answer",
        validation_batch_size=500,
    )
    rollouts = RolloutCallback(
        exact_match, engine=LocalEngine(max_sequences=500), sampling=SamplingSpec(max_new_tokens=5)
    )
    trainer = quiet_trainer(folder, callbacks=[rollouts])
    return trainer.validate(GRPOModule(str(model)), data, verbose=False)[0]["val/reward"]


def quiet_trainer(folder: Path, **arguments: object) -> L.Trainer:
    """A Trainer that prints and saves nothing."""
    return L.Trainer(
        default_root_dir=folder,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **arguments,  # type: ignore[arg-type]
    )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["local", "vllm"], default="local", help="what generates")
    parser.add_argument("--folder", type=Path, default=Path("runs/arithmetic"), help="where everything is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=None, help="of GRPO; as the YAML says when not given")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    torch.set_num_threads(1)  # a second thread slows down a model this small
    began = time.perf_counter()
    folder = arithmetic.make(arguments.folder, arguments.seed)
    L.seed_everything(arguments.seed, verbose=False)
    start = supervised_start(folder)
    before = heldout_accuracy(folder, start)
    print(f"after supervised fine-tuning: {before:.1%} of the held-out additions right; now GRPO", flush=True)

    words = ["fit", "--config", str(HERE / "grpo_arithmetic.yaml")]
    if arguments.engine == "vllm":
        words += ["--config", str(HERE / "grpo_arithmetic_vllm.yaml")]
    words += ["--seed_everything", str(arguments.seed), "--model.init_args.model", str(start)]
    for name in ("train", "heldout"):
        key = "data" if name == "train" else "validation_data"
        words += [f"--data.init_args.{key}", str(folder / f"{name}.jsonl")]
    words += ["--trainer.logger.init_args.save_dir", str(folder)]
    if arguments.iterations is not None:
        words += ["--trainer.max_epochs", str(arguments.iterations)]
    cli = run(words)

    after = heldout_accuracy(folder, cli.model.save_pretrained(folder / "grpo_model"))
    report = next(callback for callback in cli.trainer.callbacks if isinstance(callback, RunReport))
    print(f"held-out accuracy before GRPO: {before:.1%}")
    print(f"held-out accuracy after GRPO:  {after:.1%} ({100 * (after - before):+.1f} points)")
    print(f"report: {report.saved}")
    print(f"model:  {folder / 'grpo_model'}")
    print(f"took {time.perf_counter() - began:.0f} s with the {arguments.engine} engine")


if __name__ == "__main__":
    main()
