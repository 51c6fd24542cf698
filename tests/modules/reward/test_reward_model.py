"""RewardModule: the constants that normalise, calibration."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modules import scalar_cases
from modules.data_runs import folder_of
from rlhfkit.modules.reward.base import Calibration

folder = folder_of(scalar_cases.prepare)


def test_mean_and_deviation_of_validation_rewards_are_saved_and_normalise(folder: Path, tmp_path: Path) -> None:
    def data(size: int) -> Any:
        return scalar_cases.data(folder, "reward", size, validation_data=str(folder / "reward.jsonl"))

    module, source = scalar_cases.module(folder, "reward"), data(5)
    run = scalar_cases.trainer(tmp_path, max_epochs=1)
    run.fit(module, source)
    batches = list(data_batches(source, run))
    raw = torch.cat([module.scores(batch).detach() for batch in batches])
    assert len(raw) == 2 * scalar_cases.ROWS
    assert module.constants == pytest.approx((float(raw.mean()), float(raw.std())), rel=1e-5)
    assert run.callback_metrics["val/reward_mean"] == pytest.approx(float(raw.mean()), rel=1e-5)
    gap = raw[::2] - raw[1::2]
    squares = (gap.abs().sigmoid() - (gap > 0).float()).square()  # of the chance of the larger reward
    assert run.callback_metrics["val/brier"] == pytest.approx(float(squares.mean()), rel=1e-5)
    assert run.callback_metrics["val/accuracy"] == pytest.approx(float((gap > 0).float().mean()))
    normalized = torch.cat([module.predict_step(batch, 0) for batch in batches])
    assert float(normalized.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(normalized.std()) == pytest.approx(1.0, rel=1e-5)

    again = scalar_cases.module(folder, "reward")
    again.model_name = str(module.save_pretrained(tmp_path / "saved"))
    again.configure_model()
    assert again.constants == pytest.approx(module.constants)
    torch.testing.assert_close(again.predict_step(batches[0], 0), module.predict_step(batches[0], 0))

    unvalidated = scalar_cases.trainer(tmp_path, max_epochs=1, limit_val_batches=0)
    unvalidated.fit(again, data(8))
    assert again.constants is None  # those it was loaded with are of another model


def data_batches(source: Any, run: Any) -> Any:
    source.trainer = run
    return source.val_dataloader()


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
