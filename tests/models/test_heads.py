"""Scalar models against Transformers' own classifiers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlhfkit.data import TokenBatch
from rlhfkit.data.batch import TokenExample, collate_tokens
from rlhfkit.models import load_scalar_model, reward_output, scalar_output
from rlhfkit.models.heads import ScalarModel

LENGTHS = (3, 9, 6, 1)


@pytest.fixture
def batch() -> TokenBatch:
    """Four sequences, the third of which begins like the second."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in LENGTHS]
    rows[2][:4] = rows[1][:4]
    return collate_tokens([TokenExample(row, [False] * len(row)) for row in rows])


def by_transformers(kind: Any, folder: str | Path, batch: TokenBatch) -> list[torch.Tensor]:
    """Logits of each sequence alone."""
    model = kind.from_pretrained(folder, attn_implementation="eager").eval()
    rows = zip(batch.input_ids, LENGTHS, strict=True)
    return [model(input_ids=ids[None, :length]).logits[0] for ids, length in rows]


def test_a_saved_reward_model_gives_the_same_scores_in_transformers(
    folder: str, batch: TokenBatch, tmp_path: Path
) -> None:
    model = load_scalar_model(folder)
    model.save_pretrained(tmp_path)
    expected = torch.cat(by_transformers(AutoModelForSequenceClassification, tmp_path, batch))
    torch.testing.assert_close(reward_output(model, batch), expected, rtol=1e-5, atol=1e-6)
    assert expected.std() > 1e-3


def test_a_stepwise_model_is_the_log_odds_of_transformers_token_classifier(
    folder: str, batch: TokenBatch, tmp_path: Path
) -> None:
    model = load_scalar_model(folder, stepwise=True)
    model.save_pretrained(tmp_path)
    out = scalar_output(model, batch)
    for row, logits in enumerate(by_transformers(AutoModelForTokenClassification, tmp_path, batch)):
        good = logits.softmax(-1)[:, 1]
        torch.testing.assert_close(out[row, : LENGTHS[row]].sigmoid(), good, rtol=1e-5, atol=1e-6)
        assert not out[row, LENGTHS[row] :].any()


def test_only_wanted_tokens_have_a_number(folder: str, batch: TokenBatch) -> None:
    model = load_scalar_model(folder)
    mask = batch.attention_mask & (torch.arange(9) % 2 == 0)
    torch.testing.assert_close(scalar_output(model, batch, mask), scalar_output(model, batch) * mask)


@pytest.mark.parametrize(("std", "expected"), [(None, 1 / 65), (0.0, 0.0), (0.5, 0.5)])
def test_a_new_head_has_the_asked_spread_and_does_not_depend_on_the_seed(
    folder: str, std: float | None, expected: float
) -> None:
    weights = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        weights.append(load_scalar_model(folder, head_std=std).model.score.weight)
    assert torch.equal(*weights)
    assert weights[0].square().mean().sqrt().item() == pytest.approx(expected, rel=0.2)  # of 64 draws


def test_weights_that_are_missing_are_no_random_ones(folder: str, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no weights for 1 parameters of .*, among them model\.norm\.weight"):
        load_scalar_model(str(tmp_path))


def test_a_saved_head_stays_and_constants_of_its_configuration_normalise(
    folder: str, batch: TokenBatch, tmp_path: Path
) -> None:
    model = load_scalar_model(folder, head_std=1.0)
    raw = reward_output(model, batch)
    assert torch.equal(reward_output(model, batch, normalized=True), raw)
    model.config.mean, model.config.std = 0.25, 2.0
    model.save_pretrained(tmp_path)
    again = load_scalar_model(str(tmp_path), head_std=0.0)
    torch.testing.assert_close(reward_output(again, batch, normalized=True), (raw - 0.25) / 2)


def test_the_head_computes_in_float32_under_bfloat16(folder: str, batch: TokenBatch) -> None:
    model = load_scalar_model(folder, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = reward_output(model, batch)
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.bfloat16().float())


def test_several_heads_are_what_each_is_alone(folder: str, batch: TokenBatch) -> None:
    class Heads(ScalarModel):
        def numbers(self, outputs: torch.Tensor) -> torch.Tensor:
            return outputs

    one: Any = load_scalar_model(folder).model
    weight = torch.randn(3, one.score.in_features, generator=torch.Generator().manual_seed(1))
    several = []
    for rows in (weight, *weight.split(1)):
        one.score = torch.nn.Linear(rows.shape[1], len(rows), bias=False)
        one.score.weight.data.copy_(rows)
        several.append(scalar_output(Heads(one), batch))
    torch.testing.assert_close(several[0], torch.cat(several[1:], -1))
    torch.testing.assert_close(reward_output(Heads(one), batch), reward_output(ScalarModel(one), batch)[:, None])


def test_wrong_classifiers_and_spreads_are_refused(folder: str, tmp_path: Path) -> None:
    load_scalar_model(folder).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a LlamaForSequenceClassification with 1 labels; needed is"):
        load_scalar_model(str(tmp_path), stepwise=True)
    with pytest.raises(
        ValueError, match=r"is a LlamaForCausalLM; needed is a ...ForSequenceClassification with 1 labels"
    ):
        load_scalar_model(folder, new_head=False)
    with pytest.raises(ValueError, match="head_std must not be negative, got -1"):
        load_scalar_model(folder, head_std=-1.0)
