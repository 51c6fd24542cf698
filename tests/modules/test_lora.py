"""Modules that train adapters: checkpoints, 4 bits, types, options. Covers ``checkpointing.py``."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from modules.data_runs import Steps, data, fit, folder_of, trainer
from rlhfkit import GRPOModule, LoRA, SFTModule
from rlhfkit.models import ModelLoading, load_causal_lm

folder = folder_of()


@pytest.mark.parametrize("lora", [LoRA(rank=4), LoRA(rank=4, dora=True, dropout=0.1)], ids=["lora", "dora"])
def test_a_checkpoint_holds_adapters_only(folder: Path, tmp_path: Path, lora: LoRA) -> None:
    """A resumed run is the straight one: ``test_step_properties.py``."""
    run, module = trainer(folder), SFTModule(str(folder / "model"), lr=1e-2, lora=lora)
    run.fit(module, data(folder, SFTModule))
    path = tmp_path / "run.ckpt"
    run.save_checkpoint(path)
    state = torch.load(path, weights_only=True)  # hyperparameters are plain values
    assert state["hyper_parameters"]["lora"] == lora.plain()
    trained = {f"policy.{name}" for name, parameter in module.policy.named_parameters() if parameter.requires_grad}
    assert set(state["state_dict"]) == trained
    assert len(state["optimizer_states"][0]["state"]) == len(trained)
    loaded, base = SFTModule.load_from_checkpoint(path), load_causal_lm(str(folder / "model")).state_dict()
    assert loaded.lora == lora
    for name, tensor in module.policy.state_dict().items():
        assert torch.equal(tensor, loaded.policy.state_dict()[name])
        assert ".lora_" in name or torch.equal(tensor, base[name.replace(".base_layer", "")])


def test_weights_of_4_bits_are_trained_beside_saved_and_merged(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="4 bits are bitsandbytes' (extra qlora)")
    module = SFTModule(str(folder / "model"), lr=1e-2, lora=LoRA(rank=4), loading=ModelLoading(quantization="nf4"))
    run = trainer(folder, max_epochs=4, callbacks=[steps := Steps()])
    run.fit(module, data(folder, SFTModule))
    assert steps.losses[-1] < steps.losses[0] - 0.3
    assert module.policy.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    run.save_checkpoint(tmp_path / "q.ckpt")
    module = SFTModule.load_from_checkpoint(tmp_path / "q.ckpt")
    merged = load_causal_lm(str(module.save_pretrained(tmp_path / "merged")))
    ids = torch.tensor([[5, 9, 20, 33, 7]])
    with torch.no_grad():
        ours, theirs = module.policy(input_ids=ids).logits, merged(input_ids=ids).logits
        full = load_causal_lm(str(folder / "model"))(input_ids=ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, full, atol=0.1)


def test_adapters_stay_in_float32_beside_weights_of_16_bits(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"knobs": {"lora": LoRA(rank=4), "lr": 0.1}, "precision": "bf16-true"}
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    straight = fit(folder, SFTModule, callbacks=[saver], enable_checkpointing=True, **options)
    assert straight.losses[-1] < straight.losses[0]
    for name, parameter in straight.module.policy.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
    resumed = fit(folder, SFTModule, resume=str(tmp_path / "epoch=0.ckpt"), **options)
    assert all(torch.equal(tensor, straight.weights[name]) for name, tensor in resumed.weights.items())


def test_dropout_of_adapters_is_not_switched_off_silently(folder: Path) -> None:
    module = GRPOModule(str(folder / "model"), lora=LoRA(rank=2, dropout=0.1))
    with pytest.warns(UserWarning, match=r"adapters' dropout of 0.1 is switched off"):
        module.configure_model()
    with warnings.catch_warnings(record=True) as said:
        GRPOModule(str(folder / "model"), lora=LoRA(rank=2)).configure_model()
    assert not [one for one in said if "dropout" in str(one.message)]
