"""ProcessRewardModule: a known optimum, and what is saved."""

import math
from pathlib import Path

import pytest
import torch

from modules import scalar_cases
from rlhfkit import ProcessRewardModule, StepwiseDataModule
from rlhfkit.models.forward import unwrap


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("process")
    scalar_cases.prepare(folder)
    return folder


def test_it_learns_hard_and_soft_labels(folder: Path, tmp_path: Path) -> None:
    """Steps with an x are bad, those with a g are good and those with an m are good in 70 of 100 cases."""
    quality = {"g": 1.0, "x": 0.0, "m": 0.7}
    words = ["ggxm"[i % 4] + "gxmm"[i // 4 % 4] + "xgm"[i % 3] for i in range(24)]
    rows = [
        {"prompt": f"{i}?", "completions": [f"{c}{i % 7}" for c in word], "labels": [quality[c] for c in word]}
        for i, word in enumerate(words)
    ]
    data = StepwiseDataModule(rows, validation_data=rows, micro_batch_size=12, max_length=32)
    module = ProcessRewardModule(str(folder / "model"), lr=3e-3)
    run = scalar_cases.trainer(tmp_path, max_epochs=40, check_val_every_n_epoch=40)
    run.fit(module, data)
    metrics = run.validate(module, data, verbose=False)[0]
    share = sum(word.count("m") for word in words) / sum(map(len, words))
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3))
    assert metrics["val/loss"] == pytest.approx(share * entropy, abs=0.03)
    assert metrics["val/accuracy"] == 1.0
    assert metrics["val/ece"] < 0.03
    assert metrics["val/brier"] < 0.01
    for batch in data.val_dataloader():
        for row, predicted in enumerate(module.predict_step(batch, 0)):
            wanted = batch.labels[row][batch.loss_mask[row]]
            assert len(predicted) == 3
            torch.testing.assert_close(predicted, wanted, rtol=0, atol=0.15)


def test_a_saved_model_is_a_token_classifier_whose_label_1_is_good(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForTokenClassification

    source = scalar_cases.data(folder, "process", 8, validation_data=str(folder / "process.jsonl"))
    module = scalar_cases.module(folder, "process")
    run = scalar_cases.trainer(tmp_path, max_epochs=2)
    run.fit(module, source)
    saved = AutoModelForTokenClassification.from_pretrained(module.save_pretrained(tmp_path / "saved")).eval()
    batch = next(iter(source.val_dataloader()))
    expected = saved(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.softmax(-1)[..., 1]
    together = torch.cat(module.predict_step(batch, 0))
    torch.testing.assert_close(together, expected[batch.step_ends], rtol=1e-5, atol=1e-6)
    assert unwrap(module.policy).config.pad_token_id == 0  # not that of the end of a sequence
