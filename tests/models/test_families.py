"""Every model family against plain Transformers, which is given one sequence at a time and its own attention."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import local_engine
from transformers import AutoModelForCausalLM

from models.conftest import Folders
from models.families import FAMILIES, Family, alone
from models.test_forward import answered
from rlhfkit import SamplingSpec
from rlhfkit.data import Experience, Prompt
from rlhfkit.models import LoRA, load_causal_lm, policy_output
from rlhfkit.models.attention.packed import PACKED_ATTENTION
from rlhfkit.models.load import disable_dropout
from rlhfkit.models.weights.files import save_weights
from rlhfkit.rollout import ModuleWeights

TOLERANCE = 1e-4
"""Nats. In float32, with log-probs around -5, orders of summation differ by about 1e-5."""

PROMPTS = ([7, 8, 9, 10, 40, 33], [7, 8, 9, 10, 40, 33], [7, 8, 9, 51], [20, 21, 22, 60, 61, 62, 63])
COMPLETIONS = ([30, 31, 32], [30, 40, 35, 36, 37, 80], [42, 50], [70, 31, 32, 45, 46])


def experience() -> Experience:
    """Four rows: two answers to one prompt, a prompt that begins alike, and another; all longer than any window."""
    return answered(zip(PROMPTS, COMPLETIONS, strict=True))


MIXTURES = {"mixtral", "qwen3_moe", "deepseek_v3"}
COMMON = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt2"} | MIXTURES
"""Types of the families that every run of the tests looks at."""


@pytest.fixture(
    params=[
        pytest.param(family, id=family.name, marks=[pytest.mark.long] * (family.model_type not in COMMON))
        for family in FAMILIES
    ]
)
def family(request: pytest.FixtureRequest) -> Family:
    if request.param.name == "Moshi (text)" and Version(transformers.__version__) < Version("5.18"):
        # Training refuses it there: the module compares rows of its first batch with what they are alone.
        pytest.skip("rows of a padded batch see one another in Moshi of Transformers before 5.18")
    return request.param


def plain_model(folder: Path | str, family: Family) -> Any:
    """Transformers' model with its own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=family.reference, dtype=torch.float32)
    disable_dropout(model)
    return model.eval()


def plain_output(model: Any, batch: Experience) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the actions from full logits, one sequence at a time."""
    logprobs, entropies = [torch.zeros(batch.action_mask.shape) for _ in range(2)]
    for row, length in enumerate(batch.lengths.tolist()):
        logprobs[row, : length - 1], entropies[row, : length - 1] = alone(model, batch.input_ids[row, :length])
    mask = batch.action_mask
    return logprobs.masked_fill(~mask, 0.0), entropies.masked_fill(~mask, 0.0)


def learn(model: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of a sum in which every row has another weight."""
    weights = torch.arange(1.0, 1.0 + len(logprobs))[:, None]
    (logprobs * weights + 0.3 * entropies).sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Relative to the whole gradient."""
    assert ours.keys() == theirs.keys()
    squares = [((ours[name] - theirs[name]) ** 2).sum() for name in theirs]
    return float((torch.stack(squares).sum() / torch.stack([(one**2).sum() for one in theirs.values()]).sum()).sqrt())


def test_log_probs_entropy_and_gradient_are_those_of_each_sequence_alone(family: Family, folders: Folders) -> None:
    folder = folders[family.name]
    model, batch = load_causal_lm(folder), experience()
    disable_dropout(model)
    seen: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: seen.append(ids[0].numel()))
    out = policy_output(model, batch, batch.action_mask, entropy=True)
    assert out.entropy is not None
    plain = plain_model(folder, family)
    logprobs, entropies = plain_output(plain, batch)
    torch.testing.assert_close(out.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(out.entropy, entropies, rtol=0, atol=TOLERANCE)
    assert distance(learn(model, out.logprobs, out.entropy), learn(plain, logprobs, entropies)) < 1e-4
    packed = model.config.get_text_config()._attn_implementation == PACKED_ATTENTION
    assert packed == family.packed
    shared = 6 + 1 + 3  # what the second row has of the first, and the third of the second
    assert seen[-1] == (sum(map(len, PROMPTS)) + sum(map(len, COMPLETIONS)) - shared if packed else 4 * 12)


def test_samples_of_the_local_engine_have_the_trainers_log_probs(family: Family, folders: Folders) -> None:
    folder = folders[family.name]
    model = load_causal_lm(folder).eval()
    engine = local_engine(folder, model)
    prompts = [Prompt(index, prompt) for index, prompt in enumerate(PROMPTS[1:])]
    samples = engine.generate(prompts, SamplingSpec(group_size=2, max_new_tokens=5, seed=3), iteration=0)
    batch = answered((one.prompt.token_ids.tolist(), one.token_ids.tolist()) for one in samples)
    with torch.no_grad():
        out = policy_output(model, batch, batch.action_mask)
    theirs = torch.cat([torch.tensor(one.logprobs) for one in samples])
    torch.testing.assert_close(out.logprobs[batch.action_mask], theirs, rtol=0, atol=TOLERANCE)


def test_what_is_saved_and_exported_says_the_same(family: Family, folders: Folders, tmp_path: Path) -> None:
    folder, batch = folders[family.name], experience()
    model = load_causal_lm(folder, lora=LoRA(rank=2)).eval()
    disable_dropout(model)
    policy_output(model, batch, batch.action_mask).logprobs.sum().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name and parameter.grad is not None:  # routers read weights, around their adapters
                parameter.normal_(0, 0.1)
        out = policy_output(model, batch, batch.action_mask)
        save_weights(model, tmp_path, {name: tensor.clone() for name, tensor in ModuleWeights(model)})
        saved, _ = plain_output(plain_model(tmp_path, family), batch)
        before, _ = plain_output(plain_model(folder, family), batch)
    torch.testing.assert_close(out.logprobs, saved, rtol=0, atol=TOLERANCE)
    assert (saved - before).abs().max() > 1e-2
