"""``rlhfkit export`` and ``rlhfkit merge-adapter``: folders that Transformers and peft load, from plain checkpoints.

Covers ``folders.py`` and ``merge_adapter.py`` too.
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhfkit import LoRA, PPOModule, SamplingSpec, SFTModule
from rlhfkit.cli.export import export, merge_adapter
from rlhfkit.cli.generate import generate
from rlhfkit.cli.main import main
from rlhfkit.models.forward import unwrap

IDS = torch.tensor([[5, 9, 20, 33, 7, 11]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    tiny_model(folder / "model")
    return folder


def saved(module: Any, path: Path) -> Path:
    """A checkpoint of a module whose trained weights have moved."""
    module.configure_model()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_epochs=0)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.fixture(scope="module")
def adapted(folder: Path) -> SFTModule:
    """A module with adapters; its checkpoint is ``lora.ckpt``."""
    module = SFTModule(str(folder / "model"), lora=LoRA(rank=4))
    saved(module, folder / "lora.ckpt")
    return module


def test_adapters_are_merged_in_any_type_or_written_alone(folder: Path, adapted: SFTModule, tmp_path: Path) -> None:
    import peft

    expected = logits(adapted.policy)
    merged = export(folder / "lora.ckpt", tmp_path / "merged")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(merged)), expected, rtol=1e-5, atol=1e-5)
    alone = export(folder / "lora.ckpt", tmp_path / "alone", adapter=True)
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base, alone)), expected, rtol=1e-5, atol=1e-5)
    assert not (alone / "model.safetensors").exists()
    main(["merge-adapter", str(alone), str(tmp_path / "later")])
    first, second = (load_file(place / "model.safetensors") for place in (merged, tmp_path / "later"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    in_half = export(folder / "lora.ckpt", tmp_path / "half", dtype="bfloat16")
    assert json.loads((in_half / "config.json").read_text())["dtype"] == "bfloat16"
    for half in (in_half, merge_adapter(str(alone), tmp_path / "later_half", dtype="bfloat16")):
        found = load_file(half / "model.safetensors")
        # summed in float32, rounded once
        assert all(torch.equal(found[name], first[name].bfloat16()) for name in first)
    sampling, data = SamplingSpec(group_size=2, max_new_tokens=6), [{"prompt": "1+2="}, {"prompt": "5="}]
    texts = []
    for number, model in enumerate((alone, merged)):
        lines = generate(str(model), data, tmp_path / f"{number}.jsonl", sampling=sampling, progress=False)
        texts.append([json.loads(line)["completion"] for line in lines.read_text().splitlines()])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["full", "lora"])
def test_a_critic_is_exported_as_a_sequence_classifier(folder: Path, tmp_path: Path, lora: LoRA | None) -> None:
    module = PPOModule(str(folder / "model"), lora=lora, kl_coef=0.1)
    path = saved(module, tmp_path / "ppo.ckpt")
    main(["export", str(path), str(tmp_path / "critic"), "--child=critic"])
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    expected = unwrap(module.critic)(torch.tensor([5]), input_ids=IDS)
    torch.testing.assert_close(logits(loaded)[0], expected.detach(), rtol=1e-5, atol=1e-5)
    if lora is not None:
        with pytest.raises(ValueError, match=r"'model.score.weight' is trained beside it; write it merged"):
            export(path, tmp_path / "adapter", child="critic", adapter=True)


def test_a_checkpoint_of_a_class_from_a_script_becomes_a_folder_with_model_and_tokenizer(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Curious(SFTModule):
        def __init__(self, *args: Any, curiosity: float = 1.0, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    module = Curious(str(folder / "model"), curiosity=2.0)
    main(["export", str(saved(module, tmp_path / "run.ckpt")), str(tmp_path / "out")])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.float32
    torch.testing.assert_close(logits(loaded), logits(module.policy))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("1+2=")["input_ids"] == [20, 14, 21, 32]
    assert "exported as a rlhfkit.modules.supervised.sft:SFTModule" in caplog.text


def test_what_cannot_be_exported_says_why_and_leaves_nothing(folder: Path, adapted: SFTModule, tmp_path: Path) -> None:
    path, out = folder / "lora.ckpt", tmp_path / "out"
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        export(tmp_path / "none.ckpt", out)
    with pytest.raises(ValueError, match="holds no weights of 'critic'"):
        export(path, out, child="critic")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="was not saved from a module of rlhfkit"):
        export(tmp_path / "other.ckpt", out)
    state = torch.load(saved(SFTModule(str(folder / "model")), tmp_path / "full.ckpt"))
    del state["state_dict"]["policy.model.norm.weight"]
    torch.save(state, tmp_path / "full.ckpt")
    with pytest.raises(ValueError, match=r"do not fit .*\['model.norm.weight'\] are missing"):
        export(tmp_path / "full.ckpt", out)
    with pytest.raises(ValueError, match="holds no adapter"):
        merge_adapter(str(folder / "model"), out)
    assert not out.exists()
    assert not list(tmp_path.glob("*.tmp"))
    out.mkdir()
    with pytest.raises(FileExistsError, match="replace it with overwrite"):
        export(path, out)
    export(path, out, overwrite=True)
    assert (out / "config.json").exists()
