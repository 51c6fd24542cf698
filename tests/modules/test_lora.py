"""Modules that train adapters: checkpoints, the reference, weights of engines, 4 bits. Covers ``checkpointing.py``."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from modules.data_runs import Steps, folder_of, texts, trainer
from rlhfkit import GRPOModule, LoRA, Optimization, SFTDataModule, SFTModule
from rlhfkit.models import ModelLoading, load_causal_lm

folder = folder_of(texts)


def fit(
    folder: Path, module: SFTModule, epochs: int = 2, precision: Any = "32-true", **arguments: Any
) -> tuple[L.Trainer, list[float]]:
    """Train on the 24 rows, one update an epoch; the losses."""
    steps = Steps()
    run = trainer(folder, max_epochs=epochs, precision=precision, callbacks=[steps])
    run.fit(module, SFTDataModule(str(folder / "data.jsonl"), micro_batch_size=24, max_length=64), **arguments)
    return run, steps.losses


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.policy.state_dict().items()}


@pytest.mark.parametrize("lora", [LoRA(rank=4), LoRA(rank=4, dora=True, dropout=0.1)], ids=["lora", "dora"])
def test_a_checkpoint_holds_adapters_only_and_resumes_bitwise(folder: Path, tmp_path: Path, lora: LoRA) -> None:
    def module() -> SFTModule:
        return SFTModule(str(folder / "model"), lr=1e-2, lora=lora)

    torch.manual_seed(0)
    straight = module()
    _, losses = fit(folder, straight, epochs=4)
    assert losses[-1] < losses[0]
    torch.manual_seed(0)
    half = module()
    run, _ = fit(folder, half, epochs=2)
    path = tmp_path / "half.ckpt"
    run.save_checkpoint(path)
    state = torch.load(path, weights_only=True)  # hyperparameters are plain values
    assert state["hyper_parameters"]["lora"] == lora.plain()
    trained = {f"policy.{name}" for name, parameter in half.policy.named_parameters() if parameter.requires_grad}
    assert set(state["state_dict"]) == trained
    assert len(state["optimizer_states"][0]["state"]) == len(trained)

    loaded = SFTModule.load_from_checkpoint(path)
    assert loaded.lora == lora
    assert all(torch.equal(tensor, weights(half)[name]) for name, tensor in weights(loaded).items())
    if lora.dropout == 0:  # else the straight run's generator has moved on
        resumed = module()
        fit(folder, resumed, epochs=4, ckpt_path=path)
        assert all(torch.equal(tensor, weights(straight)[name]) for name, tensor in weights(resumed).items())
    base = load_causal_lm(str(folder / "model")).state_dict()
    for name, tensor in weights(straight).items():
        if ".lora_" not in name:
            assert torch.equal(tensor, base[name.replace(".base_layer", "")])


def test_an_exported_adapter_is_trained_on_with_itself_as_the_reference(folder: Path, tmp_path: Path) -> None:
    first = SFTModule(str(folder / "model"), lr=1e-2, lora=LoRA(rank=4))
    fit(folder, first)
    first.save_pretrained(tmp_path / "adapter", adapter=True)
    assert (tmp_path / "adapter" / "tokenizer_config.json").exists()
    second = GRPOModule(str(tmp_path / "adapter"), kl_coef=0.1)
    second.configure_model()
    assert not hasattr(second, "reference")
    ids = torch.tensor([[5, 9, 20, 33, 7]])
    with torch.no_grad():
        before = first.policy(input_ids=ids).logits
        for parameter in second.policy.parameters():
            if parameter.requires_grad:
                parameter += 0.01
        with second.reference_model() as reference:
            assert torch.equal(reference(input_ids=ids).logits, before)
        assert not torch.allclose(second.policy(input_ids=ids).logits, before, atol=1e-2)


def test_weights_of_4_bits_are_trained_beside_saved_and_merged(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="4 bits are bitsandbytes' (extra qlora)")
    module = SFTModule(str(folder / "model"), lr=1e-2, lora=LoRA(rank=4), loading=ModelLoading(quantization="nf4"))
    run, losses = fit(folder, module, epochs=6)
    assert losses[-1] < losses[0] - 0.3
    assert module.policy.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.uint8
    path = tmp_path / "q.ckpt"
    run.save_checkpoint(path)
    names = torch.load(path, weights_only=True)["state_dict"]
    assert all(".lora_" in name for name in names)
    module = SFTModule.load_from_checkpoint(path)
    module.save_pretrained(tmp_path / "merged")
    merged = load_causal_lm(str(tmp_path / "merged"))
    ids = torch.tensor([[5, 9, 20, 33, 7]])
    with torch.no_grad():
        ours, theirs = module.policy(input_ids=ids).logits, merged(input_ids=ids).logits
        full = load_causal_lm(str(folder / "model"))(input_ids=ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, full, atol=0.1)


def test_adapters_stay_in_float32_beside_weights_of_16_bits(folder: Path, tmp_path: Path) -> None:
    def module() -> SFTModule:
        return SFTModule(str(folder / "model"), lr=1e-2, lora=LoRA(rank=4))

    straight = module()
    _, losses = fit(folder, straight, epochs=4, precision="bf16-true")
    assert losses[-1] < losses[0]
    for name, parameter in straight.policy.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
    run, _ = fit(folder, module(), precision="bf16-true")
    run.save_checkpoint(tmp_path / "half.ckpt")
    resumed = module()
    fit(folder, resumed, epochs=4, precision="bf16-true", ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(tensor, weights(straight)[name]) for name, tensor in weights(resumed).items())


def test_loggers_write_plain_values(folder: Path, tmp_path: Path) -> None:
    import yaml
    from lightning.pytorch.loggers import CSVLogger

    module = GRPOModule(
        str(folder / "model"), lora=LoRA(rank=4, targets=("q_proj",)), optimization=Optimization(betas=[0.9, 0.95])
    )
    logger = CSVLogger(tmp_path)
    logger.log_hyperparams(module.hparams_initial)
    logger.save()
    written = yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())
    assert written["lora"] == LoRA(rank=4, targets=("q_proj",)).plain()
    assert written["policy_loss"] == "rlhfkit.losses.policy.ppo.dapo_loss"


def test_dropout_of_adapters_is_not_switched_off_silently(folder: Path) -> None:
    module = GRPOModule(str(folder / "model"), lora=LoRA(rank=2, dropout=0.1))
    with pytest.warns(UserWarning, match=r"adapters' dropout of 0.1 is switched off"):
        module.configure_model()
    with warnings.catch_warnings(record=True) as said:
        GRPOModule(str(folder / "model"), lora=LoRA(rank=2)).configure_model()
    assert not [one for one in said if "dropout" in str(one.message)]


def test_the_command_line_takes_lora_as_options_or_yaml(folder: Path, tmp_path: Path) -> None:
    from rlhfkit.cli.main import lightning_cli

    config = tmp_path / "run.yaml"
    config.write_text(
        f"model:\n  class_path: rlhfkit.SFTModule\n  init_args:\n    model: {folder / 'model'}\n"
        "    lora:\n      rank: 4\n      targets: [q_proj, v_proj]\n"
        f"data:\n  class_path: rlhfkit.SFTDataModule\n  init_args:\n    data: {folder / 'data.jsonl'}\n"
    )
    quiet = ["--trainer.fast_dev_run=1", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    done = lightning_cli(["fit", "--config", str(config), "--model.init_args.lora.alpha=32", *quiet])
    assert done.model.lora == LoRA(rank=4, alpha=32, targets=("q_proj", "v_proj"))
