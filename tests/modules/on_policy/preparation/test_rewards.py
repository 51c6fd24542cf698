"""Reward models as children of the module, and what becomes of rewards before advantages.

Covers ``modules/parts/reward_model.py``.
"""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from rlhfkit import GRPOModule, ModelPool, OnPolicyDistillationModule
from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.models import ModelLoading
from rlhfkit.models.forward import forward_of, packs_batches
from rlhfkit.models.heads import load_scalar_model
from rlhfkit.modules.parts import RewardModel


def reward_model(folder: Path) -> str:
    """A reward model that normalizes its scores."""
    model = load_scalar_model(str(tiny_model(folder / "base", seed=3)), head_std=0.5)
    model.config.mean, model.config.std = 0.5, 2.0
    model.save_pretrained(folder / "reward")
    tiny_tokenizer().save_pretrained(folder / "reward")
    return str(folder / "reward")


def test_a_reward_model_without_a_head_and_models_with_other_tokens_are_refused(tmp_path: Path) -> None:
    folder = reward_model(tmp_path)
    with pytest.raises(ValueError, match=r"needed is a \.\.\.ForSequenceClassification"):
        GRPOModule(str(tmp_path / "base"), parts=[RewardModel(str(tmp_path / "base"))]).configure_model()
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="another tokenizer than the policy"):
        GRPOModule(str(tmp_path / "base"), parts=[RewardModel(folder)]).configure_model()
    for teacher in (folder, ModelPool(folder)):
        with pytest.raises(ValueError, match=r"other tokens than the student .* 1 differ, e\.g\. \['<more>'\]"):
            OnPolicyDistillationModule(str(tmp_path / "base"), teacher).configure_model()


@pytest.mark.parametrize("attention", [None, "sdpa"], ids=["packed", "padded"])
def test_forward_passes_over_an_iteration_are_within_their_limit_however_long_its_samples_are(
    tmp_path: Path, attention: str | None
) -> None:
    module = GRPOModule(str(tiny_model(tmp_path)), loading=ModelLoading(attention=attention, max_tokens_per_forward=40))
    module.configure_model()
    samples = [
        Sample(Prompt(prompt, [1] * 6), index, [2] * count, [-1.0] * count, [0] * count, "stop", reward=1.0)
        for prompt in range(3)
        for index, count in enumerate([3, 50, 20, 9])
    ]
    rows = Experience.from_samples(samples)
    batches = module.passes._forward_batches(rows, None, 40, packed=packs_batches(module.policy))[0]
    assert sorted(torch.cat(batches).tolist()) == list(range(12))
    for batch in batches:
        inputs = forward_of(module.policy).inputs(rows.select(batch)).arguments
        assert inputs["input_ids"].numel() <= 40 or len(batch) == 1
