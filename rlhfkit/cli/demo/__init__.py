"""``rlhfkit demo``: a small language model learns to add, by supervised fine-tuning and by reinforcement learning.

It makes a model and data (:func:`make`), fine-tunes the model until it gets some additions right,
and trains it with GRPO, whose only reward is whether the answer is right (``grpo_arithmetic.yaml`` beside this file).
At the end it prints the accuracy on held-out additions, before and after, and what to do next.
"""

import argparse
import json
import logging
import random
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhfkit.callbacks import RolloutCallback, RunReport
from rlhfkit.cli.main import lightning_cli
from rlhfkit.datamodules import PromptDataModule, SFTDataModule
from rlhfkit.modules import GRPOModule, Optimization, SFTModule
from rlhfkit.rewards import exact_match
from rlhfkit.rollout import LocalEngine, SamplingSpec

HERE = Path(__file__).parent
NEXT = """
next:
  open {report}   curves, samples and times of this run
  rlhfkit doctor                  what this machine can run
  rlhfkit init                    a configuration for each method, with real models and data sets
  rlhfkit init grpo               writes grpo.yaml; then: rlhfkit fit --config grpo.yaml"""


LARGEST = 49
"""Summands are 0 .. 49: 2,500 questions."""
HELD_OUT, VALIDATION = 300, 200


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of an addition, and an end-of-sequence token."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=64
    )


def save_model(folder: Path, seed: int) -> None:
    """Write a randomly initialised model and its tokenizer."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_questions(folder: Path, seed: int) -> None:
    """Write all additions, shuffled and split into training and held-out files."""
    pairs = [(a, b) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    random.Random(seed).shuffle(pairs)
    rows = [json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
    for name, lines in {
        "heldout.jsonl": rows[:HELD_OUT],
        "validation.jsonl": rows[HELD_OUT : HELD_OUT + VALIDATION],
        "demonstrations.jsonl": rows[HELD_OUT + VALIDATION :],
        "train.jsonl": rows[HELD_OUT:],
    }.items():
        (folder / name).write_text("\n".join(lines) + "\n")


def make(folder: Path, seed: int = 0) -> Path:
    """Write a task small enough for two CPU cores into a folder, which is returned.

    - ``model/``: a randomly initialised Llama of 345,000 parameters and its character tokenizer, loadable with
      ``from_pretrained``;
    - ``demonstrations.jsonl``: ``{"question": "17+25=", "answer": "42"}``, for supervised fine-tuning, and
      ``validation.jsonl``, 200 more for early stopping;
    - ``train.jsonl`` and ``heldout.jsonl``: prompts for reinforcement learning, and 300 that are never trained on.

    The seed is that of the weights and of the split.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", seed)
    save_questions(folder, seed)
    return folder


class ValidationLine(L.Callback):
    """Print a line after each validation: how many of the held-out additions are right, and since when it runs."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Print the line of this validation."""
        right = float(trainer.callback_metrics["val/reward"])
        if trainer.is_global_zero and not trainer.sanity_checking:
            done, seconds = trainer.current_epoch + 1, time.perf_counter() - self.began
            text = f"iteration {done:3d} of {trainer.max_epochs}: {right:6.1%} of the held-out additions right"
            print(f"{text}  ({seconds:.0f} s)", flush=True)


def supervised_start(folder: Path) -> Path:
    """Supervised fine-tuning, stopped as soon as the validation loss falls below 0.57 nats: a mediocre start."""
    module = SFTModule(str(folder / "model"), lr=2e-3, optimization=Optimization(warmup_steps=50))
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


def quiet_trainer(folder: Path, **arguments: Any) -> L.Trainer:
    """A Trainer that prints and saves nothing."""
    return L.Trainer(
        default_root_dir=folder,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **arguments,
    )


def demo_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="rlhfkit demo", description="A small language model learns to add.")
    parser.add_argument("--engine", choices=["local", "vllm"], default="local", help="what generates")
    parser.add_argument("--folder", type=Path, default=Path("runs/arithmetic"), help="where everything is written")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and samples")
    parser.add_argument("--iterations", type=int, help="of GRPO (default: 300; 150 with vLLM)")
    return parser


def demo_command(words: Sequence[str]) -> None:
    """Run the command with the words of a command line."""
    arguments = demo_parser().parse_args(list(words))
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()

    torch.set_num_threads(1)  # a second thread slows down a model this small
    began = time.perf_counter()
    folder = make(arguments.folder, arguments.seed)
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
    cli = lightning_cli(words)

    after = heldout_accuracy(folder, cli.model.save_pretrained(folder / "grpo_model"))
    report = next(callback for callback in cli.trainer.callbacks if isinstance(callback, RunReport))
    print(f"held-out accuracy before GRPO: {before:.1%}")
    print(f"held-out accuracy after GRPO:  {after:.1%} ({100 * (after - before):+.1f} points)")
    print(f"model:  {folder / 'grpo_model'}")
    print(f"took {time.perf_counter() - began:.0f} s with the {arguments.engine} engine")
    print(NEXT.format(report=report.saved))
