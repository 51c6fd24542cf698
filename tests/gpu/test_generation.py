"""``LocalEngine`` on the device: tokens of the CPU and of Transformers, and log-probs that scoring gives again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from gpu.comparing import Figures, random_sequences
from rlhfkit import LocalEngine, Prompt, SamplingSpec
from rlhfkit.rollout import ModuleWeights

SAMPLINGS = {
    "sampled": {"group_size": 4},
    "top-p and top-k": {"group_size": 4, "top_p": 0.9, "top_k": 40},
    "greedy": {"group_size": 1, "temperature": 0.0},
}


def engine_on(device: str, folder: Path, dtype: torch.dtype) -> tuple[LocalEngine, Any]:
    """An engine with the weights of a model in a folder, and that model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    engine = LocalEngine()
    engine.start(str(folder), dtype=dtype)
    engine.load(ModuleWeights(model), 1)
    return engine, model


def prompts(device: str) -> list[Prompt]:
    sizes = [5, 90, 17, 40, 3, 64, 21, 33] if device == "cuda" else [5, 9, 3]
    return [Prompt(index=index, token_ids=ids) for index, ids in enumerate(random_sequences(sizes))]


def tokens_of(engine: LocalEngine, device: str, sampling: SamplingSpec) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in engine.generate(prompts(device), sampling, iteration=0)]


@pytest.mark.parametrize("case", SAMPLINGS)
def test_tokens_are_those_of_the_cpu_and_greedy_ones_of_transformers(device: str, case: str, tmp_path: Path) -> None:
    size = 64 if device == "cuda" else 12
    sampling: Any = SamplingSpec(max_new_tokens=size, **SAMPLINGS[case])  # type: ignore[arg-type]
    folder = tiny_model(tmp_path)
    (engine, model), (other, _) = (engine_on(kind, folder, torch.float32) for kind in (device, "cpu"))
    found = tokens_of(engine, device, sampling)
    assert found == tokens_of(other, device, sampling)
    if case == "greedy":
        for prompt, answer in zip(prompts(device), found, strict=True):
            ids = torch.tensor([prompt.token_ids.tolist()], device=device)
            own = model.generate(ids, max_new_tokens=size, do_sample=False, attention_mask=torch.ones_like(ids))
            assert own[0, ids.shape[1] :].tolist() == answer


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=str)
def test_sampled_log_probs_are_those_of_a_forward_pass(
    device: str, dtype: torch.dtype, bound: float, tmp_path: Path, figures: Figures
) -> None:
    """Decoding with a cache against one pass over the whole text."""
    engine, _ = engine_on(device, tiny_model(tmp_path), dtype)
    sampling = SamplingSpec(group_size=4, max_new_tokens=64 if device == "cuda" else 12)
    samples = engine.generate(prompts(device), sampling, iteration=0)
    scores = engine.score([[*sample.prompt.token_ids.tolist(), *sample.token_ids.tolist()] for sample in samples])
    apart = [
        abs(one - other)
        for sample, score in zip(samples, scores, strict=True)
        for one, other in zip(sample.logprobs.tolist(), score[-len(sample.token_ids) :], strict=True)
    ]
    figures("mean difference in nats", sum(apart) / len(apart), bound)
