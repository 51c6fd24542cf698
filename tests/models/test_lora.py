"""LoRA: what is trained, what the forward pass gives, switching it off, files, and merged weights.

Also on experts that Transformers holds in one tensor.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import transformers as hf
from plain_sgd import PlainSGD
from safetensors.torch import load_file
from strategies import ranks
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor, nn

from rlhfkit import SFTDataModule, SFTModule
from rlhfkit.models import LoRA, ModelLoading, adapter_disabled, load_causal_lm, policy_output
from rlhfkit.models.lora import adapter_layers, has_adapter, save_adapter, save_initial_adapter
from rlhfkit.rollout import ModuleWeights
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy

VARIANTS = [{}, {"dora": True}, {"rslora": True}, {"init": "orthogonal"}, {"targets": ("q_proj", "down_proj")}]
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0, "initializer_range": 0.2, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16),
    "granitemoe": lambda: hf.GraniteMoeConfig(**SIZES, num_local_experts=4, logits_scaling=2.0),
    "gpt_oss": lambda: hf.GptOssConfig(**SIZES, num_local_experts=4),  # holds its experts the other way round
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "DoRA": ("dense", {"dora": True}),
    "GPT-2, whose layers are convolutions": ("gpt2", {"targets": ("c_attn", "c_fc")}),
    "GPT-2 with DoRA": ("gpt2", {"targets": ("c_attn", "c_fc"), "dora": True}),
    **{name: (name, {}) for name in EXPERTS},
}
"""Model and settings of adapters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def folders(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    torch.set_num_threads(1)
    made = {"dense": folder}
    small = hf.GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    for name, config in {"gpt2": lambda: small, **EXPERTS}.items():
        torch.manual_seed(0)
        made[name] = str(tmp_path_factory.mktemp(name))
        hf.AutoModelForCausalLM.from_config(config()).save_pretrained(made[name])
        tiny_tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def batch() -> Any:
    """Two sequences, the second padded."""
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 8:] = False
    return SimpleNamespace(input_ids=ids, attention_mask=real)


def logprobs(model: nn.Module, batch: Any) -> Tensor:
    with torch.no_grad():
        return policy_output(model, batch, batch.attention_mask[:, 1:]).logprobs


def train_a_bit(model: nn.Module, seed: int = 0) -> None:
    """Move every trained weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def load(folder: str, *, checkpointing: bool = False, **arguments: Any) -> Any:
    loading = ModelLoading(attention="eager", gradient_checkpointing=checkpointing)
    return load_causal_lm(folder, loading=loading, **arguments)


@pytest.mark.parametrize("variant", VARIANTS)
def test_new_adapters_change_nothing_and_are_all_that_is_trained(
    folder: str, batch: Any, variant: dict[str, Any]
) -> None:
    model = load_causal_lm(folder, lora=LoRA(rank=4, **variant))
    assert torch.allclose(logprobs(model, batch), logprobs(load_causal_lm(folder), batch), atol=1e-5)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    per_layer = 2 if "targets" in variant else 7  # q k v o gate up down
    assert len(adapter_layers(model)) == 2 * per_layer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_log_probs_and_gradients_are_those_of_peft_on_padded_rows(
    folder: str, batch: Any, checkpointing: bool
) -> None:
    model = load_causal_lm(folder, lora=LoRA(rank=4), loading=ModelLoading(gradient_checkpointing=checkpointing))
    train_a_bit(model)
    policy_output(model, batch, batch.attention_mask[:, 1:]).logprobs.sum().backward()
    theirs = load_causal_lm(folder, lora=LoRA(rank=4), loading=ModelLoading(attention="sdpa"))
    train_a_bit(theirs)
    logits = theirs(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    expected = chosen * batch.attention_mask[:, 1:]
    expected.sum().backward()
    assert torch.allclose(logprobs(model, batch), expected, atol=1e-5)
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) == (".lora_" not in name)
        if one.grad is not None:
            assert torch.allclose(one.grad, other.grad, atol=1e-4), name


def test_a_users_own_peft_wrapper_works_the_same(folder: str, batch: Any) -> None:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    wrapped = peft.get_peft_model(load_causal_lm(folder), config)
    train_a_bit(wrapped)
    ours = load_causal_lm(folder, lora=LoRA(rank=4, alpha=16))
    ours.load_state_dict({n.removeprefix("base_model.model."): v for n, v in wrapped.state_dict().items()})
    assert torch.equal(logprobs(wrapped, batch), logprobs(ours, batch))
    for (name, one), (other_name, other) in zip(ModuleWeights(wrapped), ModuleWeights(ours), strict=True):
        assert name == other_name
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("target", "message"),
    [("lm_head", "LoRA on the output layer"), ("embed_tokens", "LoRA on the embedding"), ("nowhere", "nowhere")],
)
def test_targets_that_cannot_be_trained_are_refused(folder: str, target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_causal_lm(folder, lora=LoRA(targets=(target,)))


def test_what_does_not_go_together_says_so(folder: str) -> None:
    with pytest.raises(ValueError, match="give lora=LoRA"):
        load_causal_lm(folder, loading=ModelLoading(quantization="nf4"))
    with pytest.raises(ValueError, match=r"LoRA\.targets must be 'all-linear' or names of layers"):
        LoRA(targets=())


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_among_all_linear_layers_and_new_adapters_change_nothing(
    folders: dict[str, str], batch: Any, name: str
) -> None:
    model, without = load(folders[name], lora=LoRA(rank=2)), load(folders[name], lora=LoRA(rank=2, experts=False))
    added = [layer for layer in adapter_layers(model) if ".experts" in layer]
    assert len(added) == 2 * 2  # two tensors in each of two layers
    assert len(adapter_layers(model)) == len(adapter_layers(without)) + 4
    torch.testing.assert_close(logprobs(model, batch), logprobs(load(folders[name]), batch))


@pytest.mark.parametrize("name", EXPERTS)
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


# ---------------------------------------------------------------- the model is its own reference


@pytest.mark.parametrize("case", ["dense", "DoRA", "mixtral", "gpt_oss"])
def test_a_model_is_its_own_reference_also_when_it_was_trained_before_and_peft_loads_it(
    folders: dict[str, str], batch: Any, tmp_path: Path, case: str
) -> None:
    import peft

    name, settings = CASES[case]
    model = load(folders[name], lora=LoRA(rank=2, alpha=6, **settings))
    train_a_bit(model)
    first = logprobs(model, batch)
    with adapter_disabled(model):
        base = logprobs(model, batch)
    assert torch.equal(base, logprobs(load(folders[name]), batch))
    assert torch.equal(logprobs(model, batch), first)
    assert not torch.allclose(first, base, atol=0.01)
    save_adapter(model, tmp_path, model.state_dict())
    further = load(str(tmp_path))
    assert torch.equal(logprobs(further, batch), first)
    trained = [name for name, parameter in further.named_parameters() if parameter.requires_grad]
    save_initial_adapter(further)
    assert trained == [name for name, parameter in further.named_parameters() if parameter.requires_grad]
    train_a_bit(further, seed=1)
    assert not torch.allclose(logprobs(further, batch), first, atol=0.01)
    with adapter_disabled(further):
        assert torch.equal(logprobs(further, batch), first)
    assert not any("start" in weight for weight, _ in ModuleWeights(further))
    theirs = peft.PeftModel.from_pretrained(load(folders[name]), str(tmp_path))
    torch.testing.assert_close(logprobs(theirs, batch), first)


def test_adapters_are_back_after_an_error(folder: str, batch: Any) -> None:
    model = load_causal_lm(folder, lora=LoRA(rank=4))
    train_a_bit(model)
    before = logprobs(model, batch)
    with pytest.raises(KeyError), adapter_disabled(model):
        raise KeyError
    assert torch.equal(logprobs(model, batch), before)
    plain = load_causal_lm(folder)
    assert not has_adapter(plain)
    with pytest.raises(ValueError, match="has no adapters"), adapter_disabled(plain):
        pass


# ---------------------------------------------------------------- files and merged weights


def test_what_peft_has_saved_is_trained_on(folder: str, batch: Any, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(load_causal_lm(folder), config)
    train_a_bit(theirs)
    theirs.save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert torch.equal(logprobs(model, batch), logprobs(theirs, batch))
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2 * 2


def test_adapters_with_more_than_lora_are_refused(folder: str, tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(load_causal_lm(folder), config).save_pretrained(tmp_path / "more")
    with pytest.raises(NotImplementedError, match="uses modules_to_save"):
        load_causal_lm(str(tmp_path / "more"))
    other = peft.get_peft_model(
        load_causal_lm(folder), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    )
    other.save_pretrained(tmp_path / "ia3")
    with pytest.raises(ValueError, match="only LoRA"):
        load_causal_lm(str(tmp_path / "ia3"))
    with pytest.raises(ValueError, match="holds an adapter already"):
        load_causal_lm(str(tmp_path / "ia3"), lora=LoRA())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_are_those_that_peft_merges(folder: str, variant: dict[str, Any], dtype: torch.dtype) -> None:
    model = load_causal_lm(folder, lora=LoRA(rank=4, **variant), dtype=dtype)
    train_a_bit(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = ModuleWeights(model)
    published = {name: tensor.clone() for name, tensor in weights}
    plain = load_causal_lm(folder, dtype=dtype)
    assert [(i.name, i.shape, i.dtype) for i in weights.metadata()] == [
        (name, tuple(p.shape), dtype) for name, p in plain.named_parameters()
    ]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for layer in adapter_layers(model).values():
        layer.merge()
    # peft merges in 16 bits, which rounds the sum of two rounded numbers.
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    for name, layer in adapter_layers(model).items():
        assert torch.allclose(published[f"{name}.weight"], layer.get_base_layer().weight, atol=tolerance)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case, (name, _) in CASES.items() if name != "dense"),
        *((case, torch.bfloat16) for case in EXPERTS),
    ],
)
def test_merged_weights_say_what_the_adapters_say(
    folders: dict[str, str], batch: Any, case: str, dtype: torch.dtype
) -> None:
    name, settings = CASES[case]
    model = load(folders[name], lora=LoRA(rank=2, **settings), dtype=dtype).eval()
    train_a_bit(model)
    merged = load(folders[name], dtype=dtype).eval()
    weights, before = ModuleWeights(model), logprobs(merged, batch)
    assert [(i.name, i.shape, i.dtype) for i in weights.metadata()] == [
        (n, tuple(p.shape), p.dtype) for n, p in merged.named_parameters()
    ]
    merged.load_state_dict({n: tensor.clone() for n, tensor in weights}, strict=False)
    tolerance = 2e-5 if dtype == torch.float32 else 0.3  # adapters of linear layers are added in another place
    torch.testing.assert_close(logprobs(merged, batch), logprobs(model, batch), rtol=0, atol=tolerance)
    assert float((logprobs(merged, batch) - before).abs().max()) > 0.1


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
    ranks.run("models.test_lora:on_rank", 2, tmp_path, model=folders[name], place=str(tmp_path / "ranks"))
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
