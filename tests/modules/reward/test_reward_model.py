"""RewardModule: a known optimum, the constants that normalise, calibration."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from modules import scalar_cases
from rlhfkit import PreferenceDataModule, RewardModule
from rlhfkit.modules.reward.base import Calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    scalar_cases.prepare(folder)
    return folder


def test_it_learns_the_strength_of_preferences(tmp_path: Path, folder: Path) -> None:
    """Bradley and Terry's optimum is known: a is preferred in 3 of 4 pairs, so its reward is higher by log 3."""
    rows = [{"prompt": f"{i % 4}:", "chosen": "a", "rejected": "b"} for i in range(24)]
    rows += [{"prompt": f"{i % 4}:", "chosen": "b", "rejected": "a"} for i in range(8)]
    data = PreferenceDataModule(rows, validation_data=rows, micro_batch_size=16, max_length=8)
    module = RewardModule(str(folder / "model"), lr=3e-3, center_rewards_coefficient=0.01)
    run = scalar_cases.trainer(tmp_path, max_epochs=30, check_val_every_n_epoch=30)
    run.fit(module, data)
    metrics = run.validate(module, data, verbose=False)[0]
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert metrics["val/loss"] == pytest.approx(entropy, abs=0.01)
    assert metrics["val/accuracy"] == 0.75
    assert metrics["val/ece"] < 0.03
    assert metrics["val/brier"] == pytest.approx(0.75 * 0.25, abs=0.01)
    batch = next(iter(data.val_dataloader()))
    raw = module.scores(batch)
    answers_a = batch.input_ids[:, 2] == batch.input_ids[0, 2]
    gap = raw[answers_a].mean() - raw[~answers_a].mean()
    assert float(gap) == pytest.approx(math.log(3), abs=0.15)


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


def test_validation_does_not_depend_on_the_micro_batch_size(folder: Path) -> None:
    module = scalar_cases.module(folder, "reward")
    seen = []
    for size in (14, 3):
        source = scalar_cases.data(folder, "reward", size, validation_data=str(folder / "reward.jsonl"))
        seen.append(scalar_cases.trainer(folder).validate(module, source, verbose=False)[0])
    assert 0 < seen[0]["val/accuracy"] < 1
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


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
