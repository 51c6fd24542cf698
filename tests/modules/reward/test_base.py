"""What reward models and process reward models save, and what they measure in validation."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from modules.data_runs import ROWS, data, folder_of, plain_module, trainer
from rlhfkit import ProcessRewardModule, RewardModule
from rlhfkit.models.forward import unwrap
from rlhfkit.modules.reward.base import Calibration

folder = folder_of()


def test_a_saved_process_model_is_a_token_classifier_whose_label_1_is_good(folder: Path, tmp_path: Path) -> None:
    source, module = data(folder, ProcessRewardModule, validated=True), plain_module(folder, ProcessRewardModule)
    run = trainer(tmp_path)
    run.fit(module, source)
    saved = AutoModelForTokenClassification.from_pretrained(module.save_pretrained(tmp_path / "saved")).eval()
    squares = []
    for batch in source.val_dataloader():
        expected = saved(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.softmax(-1)[..., 1]
        found = torch.cat(module.predict_step(batch, 0))
        torch.testing.assert_close(found, expected[batch.step_ends], rtol=1e-5, atol=1e-6)
        squares.append((found - batch.labels[batch.loss_mask]).square())
    assert run.callback_metrics["val/brier"] == pytest.approx(float(torch.cat(squares).mean()), rel=1e-4)
    assert unwrap(module.policy).config.pad_token_id == 0  # not that of the end of a sequence


def test_mean_and_deviation_of_validation_rewards_are_saved_and_normalise(folder: Path, tmp_path: Path) -> None:
    module, source = plain_module(folder, RewardModule), data(folder, RewardModule, 5, validated=True)
    run = trainer(tmp_path)
    run.fit(module, source)
    batches = list(source.val_dataloader())
    raw = torch.cat([module.scores(batch).detach() for batch in batches])
    assert len(raw) == 2 * ROWS
    assert module.constants == pytest.approx((float(raw.mean()), float(raw.std())), rel=1e-5)
    assert run.callback_metrics["val/reward_mean"] == pytest.approx(float(raw.mean()), rel=1e-5)
    gap = raw[::2] - raw[1::2]
    squares = (gap.abs().sigmoid() - (gap > 0).float()).square()  # of the chance of the larger reward
    assert run.callback_metrics["val/brier"] == pytest.approx(float(squares.mean()), rel=1e-5)
    assert run.callback_metrics["val/accuracy"] == pytest.approx(float((gap > 0).float().mean()))
    normalized = torch.cat([module.predict_step(batch, 0) for batch in batches])
    assert float(normalized.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(normalized.std()) == pytest.approx(1.0, rel=1e-5)

    saved = str(module.save_pretrained(tmp_path / "saved"))
    again = plain_module(folder, RewardModule, model=saved)
    again.configure_model()
    assert again.constants == pytest.approx(module.constants)
    torch.testing.assert_close(again.predict_step(batches[0], 0), module.predict_step(batches[0], 0))
    trainer(tmp_path, max_epochs=1).fit(again, data(folder, RewardModule))  # without validation
    assert again.constants is None  # those it was loaded with are of another model


def test_calibration_is_the_sum_over_bins() -> None:
    """Two bins by hand: 0.9 claimed four times and true three times, 0.6 claimed twice and true both times."""
    probability = torch.tensor([0.92, 0.92, 0.92, 0.92, 0.62, 0.62])
    outcome = torch.tensor([1, 1, 1, 0, 1, 1])
    whole, parts = Calibration(), [Calibration(), Calibration()]
    whole.add(probability, outcome)
    for part, rows in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        part.add(probability[rows], outcome[rows])
    ece = (4 * abs(0.92 - 0.75) + 2 * abs(0.62 - 1)) / 6
    brier = (3 * 0.08**2 + 0.92**2 + 2 * 0.38**2) / 6
    assert whole.metrics() == pytest.approx({"accuracy": 5 / 6, "ece": ece, "brier": brier})
    parts[0].sums += parts[1].sums
    assert parts[0].metrics() == pytest.approx(whole.metrics())
    certain = Calibration()
    certain.add(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]))
    assert certain.metrics() == {"accuracy": 1.0, "ece": 0.0, "brier": 0.0}
