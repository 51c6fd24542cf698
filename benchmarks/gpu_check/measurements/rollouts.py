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


@check("measure/grpo_iteration", seconds=75)
def grpo_iteration(setting: Setting) -> Iterator[Figure]:
    """Seconds of the parts of an iteration: 16 prompts, 8 samples of 128 tokens, two updates."""
    from benchmarks.gpu_check.runs import Prompts, digits, trainer
    from rlhfkit import GRPOModule, RolloutCallback, SamplingSpec

    config, new = large_config(setting.size("0.5B", "tiny")), setting.size(128, 8)
    prompts, group = setting.size((16, 8), (4, 2))
    with tempfile.TemporaryDirectory() as name:
        folder = folder_of(config, Path(name))
        model: Any = build(config, setting.device, torch.bfloat16, "sdpa")
        model.save_pretrained(folder)
        del model
        rollouts = RolloutCallback(digits, sampling=SamplingSpec(group_size=group, max_new_tokens=new))
        module = GRPOModule(str(folder), lr=1e-6)
        options = {"precision": "bf16-true", "max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
        run = trainer(setting, folder, callbacks=[rollouts], **options)
        run.fit(module, Prompts(prompts, prompts * group // 4))
        metrics = {key: float(value) for key, value in run.callback_metrics.items()}
        for key in sorted(metrics):
            if key.startswith("time/"):
                yield Figure(f"third iteration, {key}", metrics[key], unit="s")
        yield Figure("rollout_corr/logprob_abs_diff_mean", metrics["rollout_corr/logprob_abs_diff_mean"], unit="nats")
