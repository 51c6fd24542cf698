"""Noise on embeddings: its distribution, where it is, and that it is the same in a resumed run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_models import tiny_model
from torch import Tensor

from modules.data_runs import texts, trainer
from rlhfkit import SFTDataModule, SFTModule
from rlhfkit.models import load_causal_lm
from rlhfkit.modules.parts.fine_tuning import NEFTune


class SimpleBatch:
    """One sequence."""

    def __init__(self, attention_mask: Tensor) -> None:
        self.attention_mask = attention_mask

    def __len__(self) -> int:
        return 1


def test_noise_is_uniform_in_the_papers_range_and_only_in_training(tmp_path: Path) -> None:
    model = load_causal_lm(str(tiny_model(tmp_path / "model"))).train()
    layer: Any = model.get_input_embeddings()
    token_ids = torch.zeros(1, 5000, dtype=torch.int64)
    plain = layer(token_ids)
    part, length = NEFTune(5.0), torch.ones(1, 20)
    module: Any = SimpleNamespace(policy=model, current_epoch=0, global_rank=0)
    part.on_train_batch_start(Any, module, SimpleBatch(length), 0)
    noise = (layer(token_ids) - plain).flatten()
    with torch.no_grad():  # of a reference
        assert torch.equal(layer(token_ids), plain)
    model.eval()  # of a check
    assert torch.equal(layer(token_ids), plain)
    model.train()
    part.on_train_batch_end(Any, module)
    bound = 5.0 / (20.0 * plain.shape[-1]) ** 0.5
    assert float(noise.abs().max()) <= bound * 1.001
    assert float(noise.abs().max()) > bound * 0.99
    assert float(noise.mean()) == pytest.approx(0.0, abs=bound / 100)
    assert float(noise.var()) == pytest.approx(bound**2 / 3, rel=0.02), "of a uniform distribution"
    assert torch.equal(layer(token_ids), plain)


class Recorded(SFTModule):
    """Keeps the losses of training."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss


def test_training_has_noise_validation_has_none_and_a_resumed_run_has_the_same(tmp_path: Path) -> None:
    texts(tmp_path)

    def fit(alpha: float, resume: str | None = None) -> tuple[Recorded, Any]:
        module = Recorded(str(tmp_path / "model"), lr=1e-3, parts=[NEFTune(alpha)] if alpha else [])
        data = SFTDataModule(str(tmp_path / "data.jsonl"), micro_batch_size=8)
        save = ModelCheckpoint(tmp_path / f"alpha{alpha}", filename="{step}", every_n_train_steps=2, save_top_k=-1)
        run = trainer(tmp_path, max_steps=4, max_epochs=-1, callbacks=[save], enable_checkpointing=True)
        torch.manual_seed(resume is None)  # of other random numbers
        run.fit(module, data, ckpt_path=resume)
        return module, run

    straight, run = fit(30.0)
    resumed, _ = fit(30.0, str(tmp_path / "alpha30.0" / "step=2.ckpt"))
    assert resumed.losses == straight.losses[2:]
    without, _ = fit(0.0)
    assert without.losses[0] != straight.losses[0]
    batch = next(iter(run.train_dataloader))
    with torch.no_grad():
        outputs = [straight.policy_output(batch).logprobs for _ in range(2)]
    assert torch.equal(*outputs)
