"""HFExport writes complete folders that load again, keeps the latest ones, and refuses modules without export."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfkit.callbacks.export import HFExport


class Tiny(L.LightningModule):
    """Trains a two-layer Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LlamaForCausalLM(
            LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Next-token loss."""
        return nn.functional.cross_entropy(self.policy(input_ids=batch).logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.policy.parameters(), lr=0.1)

    def save_pretrained(self, folder: Path) -> None:
        """The policy as a folder."""
        self.policy.save_pretrained(folder)


def fit(module: L.LightningModule, callback: HFExport, epochs: int) -> None:
    """Train a few steps on the CPU."""
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=epochs, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader([torch.arange(12).view(2, 6)], batch_size=None))


def test_the_final_folder_holds_the_trained_weights_and_old_ones_go(tmp_path: Path) -> None:
    module = Tiny()
    fit(module, HFExport(tmp_path / "model", every_n_epochs=1, keep=2), epochs=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model-epoch3", "model-epoch4"]
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, value in module.policy.state_dict().items():
        assert torch.equal(loaded[name], value)
    earlier = LlamaForCausalLM.from_pretrained(tmp_path / "model-epoch3").state_dict()
    assert not torch.equal(earlier["lm_head.weight"], loaded["lm_head.weight"])


def test_an_existing_export_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "stale.txt").touch()
    fit(Tiny(), HFExport(tmp_path / "model"), epochs=1)
    assert not (tmp_path / "model" / "stale.txt").exists()
    assert (tmp_path / "model" / "config.json").exists()


def test_a_module_that_cannot_be_exported_is_refused_before_training(tmp_path: Path) -> None:
    class Plain(Tiny):
        save_pretrained = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match="which Plain does not have"):
        fit(Plain(), HFExport(tmp_path / "model"), epochs=1)
