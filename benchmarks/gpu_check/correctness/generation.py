"""``LocalEngine`` on the device: tokens of the CPU and of Transformers, and log-probs that scoring gives again."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.check import Figure, Setting, check
from benchmarks.gpu_check.models import random_sequences, tiny_model


def engine_on(device: str, folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """An engine with the weights of a model in a folder, and that model."""
    from transformers import AutoModelForCausalLM

    from rlhfkit import LocalEngine
    from rlhfkit.rollout import ModuleWeights

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    engine = LocalEngine()
    engine.start(str(folder), dtype=dtype)
    engine.load(ModuleWeights(model), 1)
    return engine, model


def prompts(setting: Setting) -> list[Any]:
    """Of different lengths."""
    from rlhfkit import Prompt

    sizes = setting.size([5, 90, 17, 40, 3, 64, 21, 33], [5, 9, 3])
    return [Prompt(index=index, token_ids=ids) for index, ids in enumerate(random_sequences(sizes))]


@check("generation/tokens", seconds=90)
def tokens_are_those_of_the_cpu(setting: Setting) -> Iterator[Figure]:
    """Samples and greedy answers in float32."""
    from rlhfkit import SamplingSpec

    size = setting.size(64, 12)
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_model(Path(name))
        (engine, model), (other, _) = (engine_on(device, folder, torch.float32) for device in (setting.device, "cpu"))
        for case, sampling in {
            "sampled": SamplingSpec(group_size=4, max_new_tokens=size),
            "sampled, top-p and top-k": SamplingSpec(group_size=4, max_new_tokens=size, top_p=0.9, top_k=40),
            "greedy": SamplingSpec(group_size=1, max_new_tokens=size, temperature=0.0),
        }.items():
            found = [engine.generate(prompts(setting), sampling, iteration=0) for engine in (engine, other)]
            apart = sum(one.token_ids != two.token_ids for one, two in zip(*found, strict=True))
            yield Figure(f"{case}: answers that differ from the CPU's", apart, 0)
        greedy, differing = found[0], 0
        for prompt, sample in zip(prompts(setting), greedy, strict=True):
            ids = torch.tensor([prompt.token_ids], device=setting.device)
            own = model.generate(ids, max_new_tokens=size, do_sample=False, attention_mask=torch.ones_like(ids))
            differing += own[0, ids.shape[1] :].tolist() != sample.token_ids
        yield Figure("greedy: answers that differ from Transformers' generate()", differing, 0)


@check("generation/logprobs", seconds=90)
def sampled_logprobs_are_those_of_a_forward_pass(setting: Setting) -> Iterator[Figure]:
    """Decoding with a cache against one forward pass over the whole text, by type."""
    from rlhfkit import SamplingSpec

    sampling = SamplingSpec(group_size=4, max_new_tokens=setting.size(64, 12))
    with tempfile.TemporaryDirectory() as name:
        folder = tiny_model(Path(name))
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
            engine, _ = engine_on(setting.device, folder, dtype)
            samples = engine.generate(prompts(setting), sampling, iteration=0)
            scores = engine.score([[*sample.prompt.token_ids, *sample.token_ids] for sample in samples])
            pairs = [
                (one, other)
                for sample, score in zip(samples, scores, strict=True)
                for one, other in zip(sample.logprobs, score[-len(sample.token_ids) :], strict=True)
            ]
            mean = sum(abs(one - other) for one, other in pairs) / len(pairs)
            yield Figure(f"{str(dtype).removeprefix('torch.')}: mean difference", mean, bound, "nats")
