"""ProcessRewardModule: what is saved and predicted."""

from pathlib import Path

import pytest
import torch

from modules import scalar_cases
from modules.data_runs import folder_of
from rlhfkit.models.forward import unwrap

folder = folder_of(scalar_cases.prepare)


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
    every = [(torch.cat(module.predict_step(one, 0)), one.labels[one.loss_mask]) for one in source.val_dataloader()]
    squares = torch.cat([(chance - label).square() for chance, label in every])
    assert run.callback_metrics["val/brier"] == pytest.approx(float(squares.mean()), rel=1e-4)
    assert unwrap(module.policy).config.pad_token_id == 0  # not that of the end of a sequence
