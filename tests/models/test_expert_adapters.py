"""LoRA on experts that Transformers holds in one tensor: training, switching off, files, merged weights, engines."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers as hf
from plain_sgd import PlainSGD
from safetensors.torch import load_file
from strategies import ranks
from tiny_models import tiny_tokenizer

from models.lora_cases import logprobs, train_a_bit
from rlhfkit import LoRA, SFTDataModule, SFTModule
from rlhfkit.models import ModelLoading, adapter_disabled, load_causal_lm, policy_output
from rlhfkit.models.lora import adapter_layers, save_adapter, save_initial_adapter
from rlhfkit.models.weights.files import save_weights
from rlhfkit.rollout import ModuleWeights
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.2, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16),
    "granitemoe": lambda: hf.GraniteMoeConfig(**SIZES, num_local_experts=4, logits_scaling=2.0),
    "gpt_oss": lambda: hf.GptOssConfig(**SIZES, num_local_experts=4),  # holds its experts the other way round
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    made = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        made[name] = str(tmp_path_factory.mktemp(name))
        hf.AutoModelForCausalLM.from_config(config()).save_pretrained(made[name])
        tiny_tokenizer().save_pretrained(made[name])
    return made


def load(folder: str, *, checkpointing: bool = False, **arguments: Any) -> Any:
    loading = ModelLoading(attention="eager", gradient_checkpointing=checkpointing)
    return load_causal_lm(folder, loading=loading, **arguments)


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_are_among_all_linear_layers_and_new_adapters_change_nothing(
    folders: dict[str, str], batch: Any, name: str
) -> None:
    model, without = load(folders[name], lora=LoRA(rank=2)), load(folders[name], lora=LoRA(rank=2, experts=False))
    added = [layer for layer in adapter_layers(model) if ".experts" in layer]
    assert len(added) == 2 * 2  # two tensors in each of two layers
    assert len(adapter_layers(model)) == len(adapter_layers(without)) + 4
    torch.testing.assert_close(logprobs(model, batch), logprobs(load(folders[name]), batch))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_merged_experts_by_the_chain_rule(
    folders: dict[str, str], batch: Any, name: str, checkpointing: bool
) -> None:
    model = load(folders[name], lora=LoRA(rank=2, alpha=6), checkpointing=checkpointing)
    train_a_bit(model)
    merged = load(folders[name])
    merged.load_state_dict(dict(ModuleWeights(model)), strict=False)
    for one in (model, merged):
        policy_output(one, batch, batch.attention_mask[:, 1:]).logprobs.sum().backward()
    found = dict(model.named_parameters())
    assert all((weight.grad is None) == (".lora_" not in name) for name, weight in found.items())
    experts = [n for n, p in merged.named_parameters() if ".experts." in n and p.dim() == 3]
    assert len(experts) == 4
    for weight in experts:
        place, _, tensor = weight.rpartition(".")
        layers = {layer.parameter_name: at for at, layer in adapter_layers(model).items() if at.startswith(place)}
        a, b = (found[f"{layers[tensor]}.lora_{side}.default.weight"] for side in "AB")
        gradient = merged.get_parameter(weight).grad
        for expert in range(4):
            rows, columns = a[2 * expert : 2 * expert + 2], b[:, expert::4]  # as peft lays them out
            whole = gradient[expert] if columns.shape[0] == gradient.shape[1] else gradient[expert].T
            torch.testing.assert_close(
                b.grad[:, expert::4], 3.0 * whole @ rows.detach().T, rtol=1e-3, atol=1e-5
            )  # of scale * B A
            torch.testing.assert_close(
                a.grad[2 * expert : 2 * expert + 2], 3.0 * columns.detach().T @ whole, rtol=1e-3, atol=1e-5
            )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_say_what_the_adapters_say(
    folders: dict[str, str], batch: Any, name: str, dtype: torch.dtype
) -> None:
    model = load(folders[name], lora=LoRA(rank=2), dtype=dtype)
    train_a_bit(model)
    merged = load(folders[name], dtype=dtype)
    weights = ModuleWeights(model)
    assert [(i.name, i.shape, i.dtype) for i in weights.metadata()] == [
        (n, tuple(p.shape), p.dtype) for n, p in merged.named_parameters()
    ]
    before = merged.get_parameter(next(n for n, _ in merged.named_parameters() if "experts" in n)).clone()
    merged.load_state_dict({n: tensor.clone() for n, tensor in weights}, strict=False)
    expert = next(n for n, _ in merged.named_parameters() if "experts" in n)
    assert not torch.equal(merged.get_parameter(expert), before)
    tolerance = 2e-5 if dtype == torch.float32 else 0.3  # adapters of linear layers are added in another place
    torch.testing.assert_close(logprobs(merged, batch), logprobs(model, batch), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_model_is_its_own_reference_also_when_it_was_trained_before(
    folders: dict[str, str], batch: Any, tmp_path: Path, name: str
) -> None:
    import peft

    model = load(folders[name], lora=LoRA(rank=2))
    train_a_bit(model)
    first = logprobs(model, batch)
    with adapter_disabled(model):
        assert torch.equal(logprobs(model, batch), logprobs(load(folders[name]), batch))
    save_adapter(model, tmp_path, model.state_dict())
    further = load(str(tmp_path))
    assert torch.equal(logprobs(further, batch), first)
    save_initial_adapter(further)
    train_a_bit(further, seed=1)
    assert not torch.allclose(logprobs(further, batch), first, atol=0.01)
    with adapter_disabled(further):
        assert torch.equal(logprobs(further, batch), first)
    assert not any("start" in weight for weight, _ in ModuleWeights(further))
    theirs = peft.PeftModel.from_pretrained(load(folders[name]), str(tmp_path))
    torch.testing.assert_close(logprobs(theirs, batch), first)


@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])
def test_folders_are_written_as_transformers_writes_them(
    folders: dict[str, str], batch: Any, tmp_path: Path, name: str
) -> None:
    model = load(folders[name], lora=LoRA(rank=2))
    train_a_bit(model)
    save_weights(model, tmp_path, {weight: tensor.clone() for weight, tensor in ModuleWeights(model)})
    base, merged = (load_file(Path(folder) / "model.safetensors") for folder in (folders[name], tmp_path))
    assert base.keys() == merged.keys()
    torch.testing.assert_close(logprobs(load(str(tmp_path)), batch), logprobs(model, batch), rtol=0, atol=2e-5)


def learned(model: str, folder: Path, size: int, strategy: Any) -> None:
    """Learn eight additions by SGD and write the adapter."""

    class PlainSFT(PlainSGD, SFTModule): ...

    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
    module = PlainSFT(
        model, lr=0.5, loading=ModelLoading(attention="eager", gradient_checkpointing=True), lora=LoRA(rank=2)
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=4 // size, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, SFTDataModule(rows, micro_batch_size=size, shuffle=False))
    module.save_pretrained(folder, adapter=True)


def on_rank(folder: Path, model: str, place: str) -> bool:
    """At ZeRO 3, with the experts in shards between their uses."""
    sharded = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    learned(model, Path(place), 2, RLHFDeepSpeedStrategy(stage=3, engine_configs={"policy": sharded}))
    return True


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])  # gathered as a block, and weight by weight
def test_adapters_of_sharded_experts_learn_what_one_process_learns(
    folders: dict[str, str], tmp_path: Path, name: str
) -> None:
    learned(folders[name], tmp_path / "alone", 4, "auto")
    ranks.run("models.test_expert_adapters:on_rank", 2, tmp_path, model=folders[name], place=str(tmp_path / "ranks"))
    alone, sharded = (load_file(tmp_path / where / "adapter_model.safetensors") for where in ("alone", "ranks"))
    assert alone.keys() == sharded.keys()
    assert any("experts" in weight and bool(value.any()) for weight, value in alone.items() if "lora_B" in weight)
    for weight, value in alone.items():
        torch.testing.assert_close(sharded[weight], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [{"dropout": 0.1}, {"dora": True}])
def test_what_experts_cannot_have_is_refused(folders: dict[str, str], arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"train no experts \(LoRA\(experts=False\)\)"):
        load(folders["mixtral"], lora=LoRA(**arguments))
    load(folders["mixtral"], lora=LoRA(experts=False, **arguments))
