"""``LocalEngine`` and a whole iteration of GRPO, with random weights of 0.5B parameters."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.models import build, large_config, random_sequences, tiny_model


def folder_of(config: Any, folder: Path) -> Path:
    """A folder with a configuration and a tokenizer, which an engine that is sent its weights reads."""
    tiny_model(folder)
    (folder / "model.safetensors").unlink()
    config.save_pretrained(folder)
    return folder


@check("measure/local_engine", seconds=60)
def local_engine(setting: Setting) -> Iterator[Figure]:
    """Tokens per second, bfloat16, by number of sequences."""
    from rlhfkit import LocalEngine, Prompt, SamplingSpec
    from rlhfkit.rollout import ModuleWeights

    size, new = setting.size("0.5B", "tiny"), setting.size(128, 8)
    with tempfile.TemporaryDirectory() as name:
        model, engine = build(large_config(size), setting.device, torch.bfloat16), LocalEngine()
        engine.start(str(folder_of(large_config(size), Path(name))), dtype=torch.bfloat16)
        start = time.perf_counter()
        engine.load(ModuleWeights(model), 1)
        setting.synchronize()
        yield Figure("first load of weights", time.perf_counter() - start, unit="s")
        for count in setting.size((8, 128), (2,)):
            prompts = [Prompt(index=i, token_ids=ids) for i, ids in enumerate(random_sequences([64] * (count // 2)))]
            sampling = SamplingSpec(group_size=2, max_new_tokens=new, min_new_tokens=new)
            start = time.perf_counter()
            samples = engine.generate(prompts, sampling, iteration=0)
            setting.synchronize()
            seconds = time.perf_counter() - start
            tokens = sum(sample.num_tokens for sample in samples)
            yield Figure(f"{count} sequences", tokens / seconds, unit="tokens/s")
            yield Figure(f"{count} sequences: one token of each", seconds / new * 1e3, unit="ms")


def iteration_sizes(setting: Setting) -> tuple[int, int, int]:
    """Prompts, samples of each, and tokens of each sample, in an iteration of two updates of two micro-batches."""
    return setting.size((16, 8, 128), (4, 2, 8))


def saved_model(setting: Setting, folder: Path) -> Path:
    """A folder with random weights in bfloat16 and a tokenizer."""
    config = large_config(setting.size("0.5B", "tiny"))
    model: Any = build(config, setting.device, torch.bfloat16, "sdpa")
    model.save_pretrained(folder_of(config, folder))
    return folder


@check("measure/grpo_iteration", seconds=75, simulated=False)
def grpo_iteration(setting: Setting) -> Iterator[Figure]:
    """Seconds of an iteration and its parts."""
    from benchmarks.gpu_check.runs import EpochSeconds, Prompts, digits, trainer
    from rlhfkit import GRPOModule, RolloutCallback, SamplingSpec

    prompts, group, new = iteration_sizes(setting)
    with tempfile.TemporaryDirectory() as name:
        folder = saved_model(setting, Path(name))
        sampling = SamplingSpec(group_size=group, max_new_tokens=new, min_new_tokens=new)
        rollouts, clock = RolloutCallback(digits, sampling=sampling), EpochSeconds()
        options = {"precision": "bf16-true", "max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
        run = trainer(setting, folder, callbacks=[rollouts, clock], **options)
        run.fit(GRPOModule(str(folder), lr=1e-6), Prompts(prompts, prompts * group // 4))
    yield Figure("third iteration", clock.seconds[-1], unit="s")
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    for key in sorted(metrics):
        if key.startswith("time/"):
            yield Figure(f"third iteration, {key}", metrics[key], unit="s")
    yield Figure("rollout_corr/logprob_abs_diff_mean", metrics["rollout_corr/logprob_abs_diff_mean"], unit="nats")


@check("measure/trl", seconds=75, packages=("trl", "accelerate", "datasets"), simulated=False)
def trl_iteration(setting: Setting) -> Iterator[Figure]:
    """The same iteration in TRL's ``GRPOTrainer``, which generates with Transformers."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts, group, new = iteration_sizes(setting)
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            setting.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as name:
        folder = saved_model(setting, Path(name))
        config = GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=prompts * group // 4,
            gradient_accumulation_steps=2,
            steps_per_generation=4,
            num_generations=group,
            max_completion_length=new,
            generation_kwargs={"min_new_tokens": new},
            max_steps=6,
            learning_rate=1e-6,
            use_cpu=not setting.on_gpu,
            bf16=setting.on_gpu,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        texts = [f"{number}+{number}=" for number in range(40)]
        dtype = torch.bfloat16 if setting.on_gpu else torch.float32
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
            reward_funcs=lambda completion_ids, **_: [sum(ids) % 97 / 97 for ids in completion_ids],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": texts}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[Clock()],
        ).train()
    # The third iteration is the fifth and sixth step, from the end of the fourth.
    yield Figure("third iteration", ends[5] - ends[3], unit="s")
