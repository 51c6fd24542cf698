"""One iteration of GRPO, by phase: ours synchronous and asynchronous, next to TRL's GRPOTrainer where TRL is installed.

    python benchmarks/rl.py                                  # some minutes on two cores
    python benchmarks/rl.py --prompt-tokens 512 --completion-tokens 128
    python benchmarks/rl.py --part ahead                     # only sampling ahead, with an engine elsewhere

A random Qwen3 of the asked size, the same prompts (token for token), completions of exactly the same length, the same
number of sequences per update, fp32, generation in the training process in all variants. Each runs in a process of its
own, one after the other, ``--rounds`` times; the first iteration of each process is not counted.

``seconds`` is the median time of an iteration (generate, score, one optimizer update), ``ratio`` that of TRL over ours,
``phases`` where ours goes. ``async`` overlaps generating and training on the same cores, so that on a machine without
idle ones it can gain little. ``vllm``, where vLLM is installed, has one engine in a process of its own, on one
thread; ``vllm_ratio`` is TRL's time, with generation in its own process, over it.

``elsewhere`` has an engine that takes its time without these cores, as a remote one does: it sleeps ``--slowness``
times as long as an iteration's training takes, and returns tokens without computing any. A synchronous run costs the
sum of both, sampling ahead should cost the larger of them: ``async_over_max`` and ``in_flight_over_max`` near 1,
``sync_over_max`` near 2 (with ``--slowness 1``).
Prints one line of JSON.
"""

import argparse
import importlib.util
import itertools
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from rlhfkit import Ahead

VOCABULARY = 4096
WORDS = [f"w{number}" for number in range(VOCABULARY - 2)]


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A random Qwen3 whose tokenizer has one token per word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 128, 1),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def prompts_of(options: argparse.Namespace) -> list[str]:
    """Different prompts of one length, enough for every iteration."""
    import random

    draw = random.Random(0)
    count = options.prompts * (options.iterations + 1)
    return [" ".join(draw.choices(WORDS, k=options.prompt_tokens)) for _ in range(count)]


def run_ours(
    folder: Path,
    options: argparse.Namespace,
    *,
    staleness: int = 0,
    in_flight: bool = False,
    vllm: bool = False,
    wait: float | None = None,
) -> dict[str, Any]:
    """Seconds per iteration and per phase of it; ``wait``: of an engine elsewhere."""
    import random

    import lightning as L

    from rlhfkit import GRPOModule, LocalEngine, PromptDataModule, RolloutCallback, Sample, SamplingSpec, VLLMPool

    class Elsewhere(LocalEngine):
        def generate(self, prompts: Any, sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
            time.sleep(wait or 0.0)
            draw, length, versions = random.Random(iteration), sampling.max_new_tokens, [self.version or 0]
            return [
                Sample(
                    prompt,
                    index,
                    draw.choices(range(2, VOCABULARY), k=length),
                    [-math.log(VOCABULARY)] * length,
                    versions * length,
                    "length",
                )
                for prompt in prompts
                for index in range(sampling.group_size)
            ]

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.ends = [0.0]

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.ends.append(time.perf_counter())

    warm_up = 1 if wait is None else 2  # what is sampled beside the first iteration, a slow one, gains too much
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts_of(options)))
    length, clock = options.completion_tokens, Clock()
    engine: Any = (LocalEngine if wait is None else Elsewhere)(max_sequences=options.prompts * options.group)
    if vllm:
        engine = VLLMPool(device="cpu", kv_cache_gib=0.5, max_model_len=2 * (options.prompt_tokens + length))
    rollouts = RolloutCallback(
        lambda samples: [sum(sample.token_ids.tolist()) % 97 / 97 for sample in samples],
        engine=engine,
        sampling=SamplingSpec(group_size=options.group, max_new_tokens=length, min_new_tokens=length),
        parts=[Ahead(staleness, in_flight=in_flight)] if staleness else [],
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.iterations + warm_up,
        accumulate_grad_batches=options.accumulate,
        callbacks=[clock, rollouts],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(
        GRPOModule(str(folder / "model")),
        PromptDataModule(
            str(data),
            rollout_batch_size=options.prompts,
            micro_batch_size=options.prompts * options.group // options.accumulate,
            shuffle=False,
        ),
    )
    steps = [end - start for start, end in zip(clock.ends[warm_up:], clock.ends[warm_up + 1 :], strict=False)]
    phases = [rollouts.timing.metrics(warm_up + number) for number in range(options.iterations)]
    by_phase = {name: statistics.median(each.get(name, 0.0) for each in phases) for name in phases[0]}
    return {"seconds": statistics.median(steps), "phases": by_phase}


def run_trl(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of TRL's trainer with the same sizes."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            ends.append(time.perf_counter())

    sequences = options.prompts * options.group
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=sequences // options.accumulate,
        gradient_accumulation_steps=options.accumulate,
        num_generations=options.group,
        max_completion_length=options.completion_tokens,
        generation_kwargs={"min_new_tokens": options.completion_tokens},
        max_steps=options.iterations + 1,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=lambda completion_ids, **_: [sum(ids) % 97 / 97 for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts_of(options)}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return {"seconds": statistics.median(end - start for start, end in itertools.pairwise(ends))}


def in_process(variant: str, folder: Path, arguments: list[str], **extra: float) -> dict[str, Any]:
    """Run one variant in a process of its own."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in extra.items()]
    command = [sys.executable, __file__, *arguments, f"--variant={variant}", f"--folder={folder}", *words]
    environment = os.environ | {"HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{variant} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def elsewhere(folder: Path, options: argparse.Namespace, arguments: list[str]) -> dict[str, float]:
    """An engine that uses none of these cores: taking turns, ahead, and ahead with weights in flight."""
    training = in_process("elsewhere", folder, arguments, wait=0.0)["seconds"]
    wait = options.slowness * training
    seen: dict[str, list[float]] = {"sync": [], "async": [], "in_flight": []}
    for _ in range(options.rounds):
        for name in seen:
            seen[name].append(in_process(f"elsewhere_{name}", folder, arguments, wait=wait)["seconds"])
    seconds = {name: statistics.median(runs) for name, runs in seen.items()}
    longer = max(wait, training)
    ratios = {f"{name}_over_max": value / longer for name, value in seconds.items()}
    return {"generate": wait, "train": training, **seconds, **ratios}


def compare(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """All variants in turn, round by round."""
    with_trl = importlib.util.find_spec("trl") is not None
    with_vllm = importlib.util.find_spec("vllm") is not None
    variants = ["rlhfkit", "async", *(["vllm"] if with_vllm else []), *(["trl"] if with_trl else [])]
    variants = [] if options.part == "ahead" else variants
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    sizes = {key: value for key, value in vars(options).items() if key not in ("variant", "folder", "wait", "part")}
    result: dict[str, Any] = {"benchmark": "rl", "sizes": sizes}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", options.hidden, options.layers)
        for _ in range(options.rounds):
            for variant in variants:
                seen[variant].append(in_process(variant, folder, arguments))
        if options.part != "learning":
            result["elsewhere"] = elsewhere(folder, options, arguments)
    if not variants:
        return result
    seconds = {name: statistics.median(run["seconds"] for run in runs) for name, runs in seen.items()}
    result |= {
        "seconds": seconds,
        "phases": seen["rlhfkit"][-1]["phases"],
        "async_over_sync": seconds["async"] / seconds["rlhfkit"],
        "trl": "not installed",
    }
    if with_trl:
        from importlib.metadata import version

        result["trl"] = version("trl")
        for name, variant in {"ratio": "rlhfkit", "vllm_ratio": "vllm"}.items():
            pairs = zip(seen["trl"], seen.get(variant, []), strict=False)
            ratios = [theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]
            if ratios:
                result[name] = statistics.median(ratios)
    return result


def main() -> None:
    """Parse the sizes, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "hidden": 256,
        "layers": 4,
        "prompts": 8,
        "group": 8,
        "prompt-tokens": 128,
        "completion-tokens": 64,
        "accumulate": 4,
        "iterations": 3,
        "rounds": 2,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variant", help="run this one only and print its figures (used by the script itself)")
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--wait", type=float, help="seconds that the engine elsewhere takes (used by the script itself)"
    )
    parser.add_argument("--slowness", type=float, default=1.0, help="of the engine elsewhere, in times of training")
    parser.add_argument("--part", choices=("all", "learning", "ahead"), default="all")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if options.variant is None:
        print(json.dumps(compare(options, sys.argv[1:])))
        return
    if options.variant == "trl":
        figures = run_trl(options.folder, options)
    else:
        in_flight = "in_flight" in options.variant
        ahead = int(in_flight or "async" in options.variant)
        kind = {"staleness": ahead, "in_flight": in_flight, "vllm": options.variant == "vllm", "wait": options.wait}
        figures = run_ours(options.folder, options, **kind)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
