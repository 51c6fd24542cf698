"""The load-balancing loss of a mixture of experts, against Transformers' own."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny_models import tiny_tokenizer
from transformers import MixtralConfig, MixtralForCausalLM

from modules import dpo_cases
from rlhfkit import DPOModule, KTOModule, SFTDataModule, SFTModule, UnpairedPreferenceDataModule


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of four experts, two of which each token goes to, and a dense model."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("experts")
    dpo_cases.prepare(folder)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=1,
        initializer_range=0.2,
    )
    MixtralForCausalLM(config).save_pretrained(folder / "experts")
    tiny_tokenizer().save_pretrained(folder / "experts")
    return folder


class Losses(L.Callback):
    """Loss of each micro-batch, and the router's."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = trainer.callback_metrics
        self.pairs.append((float(outputs["loss"]), float(metrics.get("aux_loss", torch.nan))))


def expected_balance(folder: Path) -> float:
    """Transformers' loss of one text, which is over all its tokens."""
    model = MixtralForCausalLM.from_pretrained(folder / "experts")
    ids = torch.tensor([[*tiny_tokenizer()("1+1=2")["input_ids"], 1]])
    return float(model(input_ids=ids, output_router_logits=True).aux_loss)


@pytest.mark.parametrize("attention", [None, "eager"])
def test_sft_adds_the_routers_loss(folder: Path, attention: str | None) -> None:
    runs = {}
    for coef in (0.0, 0.5):
        losses = Losses()
        module = SFTModule(str(folder / "experts"), router_aux_loss_coef=coef, attention=attention)
        source = SFTDataModule([{"prompt": "1+1=", "completion": "2"}], micro_batch_size=1)
        dpo_cases.trainer(folder, max_steps=1, callbacks=[losses]).fit(module, source)
        runs[coef] = losses.pairs[0]
    balance = expected_balance(folder)
    assert balance > 0.1
    assert runs[0.5][0] - runs[0.0][0] == pytest.approx(0.5 * balance, rel=1e-5)


def test_dpo_adds_the_routers_loss_and_balances_the_load(folder: Path) -> None:
    losses = Losses()
    module = DPOModule(str(folder / "experts"), router_aux_loss_coef=10.0, lr=3e-3)
    dpo_cases.trainer(folder, max_epochs=10, callbacks=[losses]).fit(module, dpo_cases.data(folder, 8))
    first, last = losses.pairs[0], losses.pairs[-1]
    assert first[0] == pytest.approx(0.6931472 + 10 * first[1], rel=1e-5)
    # With perfect balance Transformers' loss is the number of experts a token goes to, 2.
    assert last[1] - 2 < 0.5 * (first[1] - 2)


def test_kto_adds_the_routers_loss(folder: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2", "label": True}]
    runs = {}
    for coef in (0.0, 0.5):
        losses = Losses()
        module = KTOModule(str(folder / "experts"), router_aux_loss_coef=coef, loss_type="apo_zero_unpaired")
        source = UnpairedPreferenceDataModule(rows, micro_batch_size=1)
        dpo_cases.trainer(folder, max_steps=1, callbacks=[losses]).fit(module, source)
        runs[coef] = losses.pairs[0]
    assert runs[0.5][1] == pytest.approx(expected_balance(folder), rel=1e-5)
    assert runs[0.5][0] - runs[0.0][0] == pytest.approx(0.5 * runs[0.5][1], rel=1e-5)


def test_a_dense_model_has_no_router(folder: Path) -> None:
    module = DPOModule(str(folder / "model"), router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no router"):
        dpo_cases.trainer(folder, max_steps=1).fit(module, dpo_cases.data(folder, 8))
