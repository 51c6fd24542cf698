"""SFT, DPO and KTO compared with TRL: throughput and memory on the same model, token ids and machine; one JSON line.

    python benchmarks/offline.py                                   # ours only, if TRL cannot be imported
    PYTHONPATH=trl_folder python benchmarks/offline.py             # pip install --no-deps -t trl_folder trl accelerate
    python benchmarks/offline.py --tasks dpo --repeats 3

A Qwen3 of 25 million random parameters (32,000 words, width 384, 8 layers), float32, no gradient checkpointing, AdamW,
equal batch sizes. Data are words of a vocabulary with one token each, so both libraries see the same token ids. Two
epochs are trained and the second is timed, in which each example is seen once. Each variant runs in a process of its
own, all variants in turn, repeat by repeat, so that a change of the load of the machine affects all of them.

Tasks: ``sft`` in tokens per second (ours: packed; TRL: ``trl`` padded, ``trl_padding_free``, and ``trl_packed``; the
last two let samples see one another on a CPU), ``dpo`` in pairs per second (with a reference model; ``_precomputed``
with its log-probs made before, not timed), ``kto`` in examples per second. ``rate`` counts wall-clock and ``cpu_rate``
processor seconds, the best of the repeats; ``ratio`` and ``cpu_ratio`` are ours over this variant's. ``peak_mb`` is the
high-water mark of the process, ``start_mb`` what it held before training.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY, MAX_LENGTH = 32000, 512
VARIANTS = {
    "sft": ("ours", "trl", "trl_padding_free", "trl_packed"),
    "dpo": ("ours", "trl", "trl_padding_free", "ours_precomputed", "trl_precomputed"),
    "kto": ("ours", "trl"),
}


def save_model(folder: Path) -> None:
    """Write the model and a tokenizer of one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCABULARY))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def rows(task: str, count: int) -> list[dict[str, Any]]:
    """Examples of random words: prompts of 32 to 128, completions of 16 to 96 (SFT: 32 to 352)."""
    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(f"w{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randint(low, high)))

    made: list[dict[str, Any]] = []
    for index in range(count):
        prompt = {"prompt": words(32, 128)}
        if task == "sft":
            made.append(prompt | {"completion": " " + words(32, 352)})
        elif task == "dpo":
            made.append(prompt | {"chosen": " " + words(16, 96), "rejected": " " + words(16, 96)})
        else:
            made.append(prompt | {"completion": " " + words(16, 96), "label": index % 2 == 0})
    return made


class Clock:
    """Time and memory of the second epoch."""

    def __init__(self) -> None:
        self.start_mb = memory_mb("VmRSS")
        self.epochs = 0
        self.result: dict[str, float] = {}

    def begin(self) -> None:
        """An epoch begins."""
        self.epochs += 1
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def end(self) -> None:
        """An epoch ends."""
        if self.epochs == 2:
            self.result = {
                "seconds": time.perf_counter() - self.wall,
                "cpu_seconds": time.process_time() - self.cpu,
                "start_mb": self.start_mb,
                "peak_mb": memory_mb("VmHWM"),
            }


def memory_mb(field: str) -> float:
    """What Linux says about this process: ``VmRSS`` now, ``VmHWM`` at most (getrusage would count the parent too)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


def run_ours(task: str, variant: str, data: list[dict[str, Any]], batch: int, model: str, folder: str) -> Clock:
    """Train with rlhfkit."""
    import lightning as L

    from rlhfkit import (
        DPOModule,
        KTOModule,
        PreferenceDataModule,
        SFTDataModule,
        SFTModule,
        UnpairedPreferenceDataModule,
    )

    clock = Clock()

    class Timed(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            clock.begin()

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            clock.end()

    options = {"micro_batch_size": batch, "max_length": MAX_LENGTH}
    if task == "sft":
        module, loader = SFTModule(model, lr=1e-5), SFTDataModule(data, **options)
    elif task == "dpo":
        module = DPOModule(model, lr=1e-5, precompute_ref_log_probs="precomputed" in variant)
        loader = PreferenceDataModule(data, **options)
    else:
        module, loader = KTOModule(model, lr=1e-5), UnpairedPreferenceDataModule(data, **options)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[Timed()],
    )
    trainer.fit(module, loader)
    return clock


def run_trl(task: str, variant: str, data: list[dict[str, Any]], batch: int, model: str, folder: str) -> Clock:
    """Train with TRL."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    clock = Clock()

    class Timed(TrainerCallback):
        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end()

    options: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "num_train_epochs": 2,
        "learning_rate": 1e-5,
        "adam_beta2": 0.95,
        "max_length": MAX_LENGTH,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if "padding_free" in variant:
        # TRL 1.16 takes no limit here without packing; none of the examples is longer than it.
        options |= {"padding_free": True, "max_length": None}
    if "packed" in variant:
        # A packed row of 512 tokens stands for about two examples.
        options |= {"packing": True, "per_device_train_batch_size": max(1, batch // 2)}
    if "precomputed" in variant:
        options["precompute_ref_log_probs"] = True
    trainers = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
    }
    trainer, config = trainers[task]
    trainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config(**options),
        train_dataset=Dataset.from_list(data),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[Timed()],
    ).train()
    return clock


def measure(task: str, variant: str, count: int, batch: int, model: str) -> dict[str, float]:
    """Body of a worker process."""
    data = rows(task, count)
    with tempfile.TemporaryDirectory() as folder:
        run = run_ours if variant.startswith("ours") else run_trl
        result = run(task, variant, data, batch, model, folder).result
    amount = count
    if task == "sft":
        amount = sum(len((row["prompt"] + row["completion"]).split()) + 1 for row in data)
    return result | {"rate": amount / result["seconds"], "cpu_rate": amount / result["cpu_seconds"]}


def worker(arguments: argparse.Namespace, task: str, variant: str, model: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    words = ["--worker", task, variant, model, "--count", str(arguments.count), "--batch", str(arguments.batch)]
    command = [sys.executable, __file__, *words, "--threads", str(arguments.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]}
    return json.loads(lines[-1])


def summary(task: str, results: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The best of the repeats of each variant, and ours over it."""
    best: dict[str, dict[str, Any]] = {}
    for variant, runs in results.items():
        good = [run for run in runs if "error" not in run]
        best[variant] = (
            runs[0]
            if not good
            else {
                "rate": max(run["rate"] for run in good),
                "cpu_rate": max(run["cpu_rate"] for run in good),
                "peak_mb": min(run["peak_mb"] for run in good),
                "start_mb": min(run["start_mb"] for run in good),
            }
        )
    for variant, figures in best.items():
        ours = best["ours_precomputed" if "precomputed" in variant else "ours"]
        if "rate" in figures and "rate" in ours:
            figures["ratio"] = ours["rate"] / figures["rate"]
            figures["cpu_ratio"] = ours["cpu_rate"] / figures["cpu_rate"]
    return {f"{task}/{variant}": {name: _rounded(value) for name, value in best[variant].items()} for variant in best}


def _rounded(value: Any) -> Any:
    """Three digits; errors as they are."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.3g}") if value < 1000 else round(value)


def main(words: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--count", type=int, default=16, help="examples per epoch")
    parser.add_argument("--batch", type=int, default=8, help="examples per optimizer step")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    if arguments.worker:
        task, variant, model = arguments.worker
        print(json.dumps(measure(task, variant, arguments.count, arguments.batch, model)))
        return
    found = importlib.util.find_spec("trl") is not None
    report: dict[str, Any] = {"benchmark": "offline", "machine": platform.machine(), "threads": arguments.threads}
    report["trl"] = "not importable: ours only"
    if found:
        from importlib.metadata import version

        report["trl"] = version("trl")
    with tempfile.TemporaryDirectory() as model:
        save_model(Path(model))
        for task in arguments.tasks:
            variants = [variant for variant in VARIANTS[task] if found or variant.startswith("ours")]
            results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
            for _ in range(arguments.repeats):
                for variant in variants:
                    results[variant].append(worker(arguments, task, variant, model))
            report |= summary(task, results)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
