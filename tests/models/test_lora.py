"""LoRA: what is trained, what the forward pass gives, switching it off, files, and merged weights.

Also on experts that Transformers holds in one tensor.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import data_runs
from plain_sgd import PlainSGD
from safetensors.torch import load_file
from strategies import ranks
from torch import Tensor, nn

from models.conftest import Folders
from rlhfkit import SFTDataModule, SFTModule
from rlhfkit.models import LoRA, ModelLoading, adapter_disabled, load_causal_lm, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.models.lora import adapter_layers, has_adapter, save_adapter, save_initial_adapter
from rlhfkit.rollout import ModuleWeights
from rlhfkit.strategies.strategy import RLHFDeepSpeedStrategy

VARIANTS = [{}, {"dora": True}, {"rslora": True}, {"init": "orthogonal"}, {"targets": ("q_proj", "down_proj")}]
EXPERTS = ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {}),
    "DoRA": ("llama", {"dora": True}),
    "GPT-2, whose layers are convolutions": ("gpt2", {"targets": ("c_attn", "c_fc")}),
    "GPT-2 with DoRA": ("gpt2", {"targets": ("c_attn", "c_fc"), "dora": True}),
    **{name: (name, {}) for name in EXPERTS},
}
"""Model and settings of adapters."""


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


def load(folder: str, **arguments: Any) -> Any:
    model = load_causal_lm(folder, **{"loading": ModelLoading(attention="eager")} | arguments)
    disable_dropout(model)
    return model


@pytest.mark.parametrize(
    ("name", "settings", "layers"),
    [
        *(("llama", variant, 2 * (2 if "targets" in variant else 7)) for variant in VARIANTS),  # q k v o gate up down
        *((name, {}, None) for name in EXPERTS),
    ],
)
def test_new_adapters_change_nothing_and_are_all_that_is_trained(
    folders: Folders, batch: Any, name: str, settings: dict[str, Any], layers: int | None
) -> None:
    model = load(folders[name], lora=LoRA(rank=4, **settings))
    torch.testing.assert_close(logprobs(model, batch), logprobs(load(folders[name]), batch), rtol=0, atol=1e-5)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    if layers is None:  # two tensors of experts in each of two layers, among all linear ones
        layers = 4 + len(adapter_layers(load(folders[name], lora=LoRA(rank=4, experts=False))))
        assert len([layer for layer in adapter_layers(model) if ".experts" in layer]) == 4
    assert len(adapter_layers(model)) == layers


def test_a_users_own_peft_wrapper_works_the_same_and_what_it_has_saved_is_trained_on(
    folder: str, batch: Any, tmp_path: Path
) -> None:
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(load_causal_lm(folder), config)
    train_a_bit(wrapped)
    wrapped.save_pretrained(tmp_path)
    ours = load_causal_lm(folder, lora=LoRA(rank=4, alpha=16))
    ours.load_state_dict({n.removeprefix("base_model.model."): v for n, v in wrapped.state_dict().items()})
    for model in (ours, load_causal_lm(str(tmp_path))):
        assert torch.equal(logprobs(model, batch), logprobs(wrapped, batch))
        assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2 * 7
        torch.testing.assert_close(dict(ModuleWeights(model)), dict(ModuleWeights(wrapped)), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoRA(targets=("lm_head",)), "LoRA on the output layer"),
        (lambda: LoRA(targets=("embed_tokens",)), "LoRA on the embedding"),
        (lambda: LoRA(targets=("nowhere",)), "nowhere"),
        (lambda: LoRA(targets=()), r"LoRA\.targets must be 'all-linear' or names of layers"),
        (lambda: None, "give lora=LoRA"),
    ],
)
def test_what_cannot_be_trained_is_refused(folder: str, make: Callable[[], LoRA | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_causal_lm(folder, lora=(lora := make()), loading=ModelLoading(quantization=None if lora else "nf4"))


@pytest.mark.parametrize("name", ["llama", *EXPERTS])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(
    folders: Folders, batch: Any, name: str, checkpointing: bool
) -> None:
    loading = ModelLoading(gradient_checkpointing=checkpointing)  # packed, where the family is
    model = load(folders[name], lora=LoRA(rank=2, alpha=6), loading=loading)
    train_a_bit(model)
    merged = load(folders[name])
    merged.load_state_dict(dict(ModuleWeights(model)), strict=False)
    for one in (model, merged):
        policy_output(one, batch, batch.attention_mask[:, 1:]).logprobs.sum().backward()
    assert all((weight.grad is None) == (".lora_" not in name) for name, weight in model.named_parameters())
    experts = 0
    for at, layer in adapter_layers(model).items():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        place = f"{at.partition('.experts')[0]}.experts.{layer.parameter_name}" if ".experts" in at else f"{at}.weight"
        gradient = merged.get_parameter(place).grad
        count = len(gradient) if gradient.dim() == 3 else 1
        experts += count > 1
        for expert in range(count):
            rows, columns = slice(2 * expert, 2 * expert + 2), slice(expert, None, count)  # as peft lays them out
            whole = gradient[expert] if gradient.dim() == 3 else gradient
            if name == "gpt_oss" and gradient.dim() == 3:  # which holds its experts the other way round
                whole = whole.T
            of_b, of_a = 3.0 * whole @ a[rows].detach().T, 3.0 * b[:, columns].detach().T @ whole  # of scale * B A
            rounding = 1e-5 * max(1.0, float(whole.abs().max()))
            torch.testing.assert_close(b.grad[:, columns], of_b, rtol=1e-3, atol=rounding)
            torch.testing.assert_close(a.grad[rows], of_a, rtol=1e-3, atol=rounding)
    assert experts == (0 if name == "llama" else 4)


# ---------------------------------------------------------------- the model is its own reference


@pytest.mark.parametrize("case", ["dense", "DoRA", "mixtral", "gpt_oss"])
def test_a_model_is_its_own_reference_also_when_it_was_trained_before_and_peft_loads_it(
    folders: Folders, batch: Any, tmp_path: Path, case: str
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


@pytest.mark.parametrize(
    ("name", "settings", "dtype"),
    [
        *(("llama", variant, dtype) for variant in VARIANTS for dtype in (torch.float32, torch.bfloat16)),
        *((*case, torch.float32) for case in CASES.values() if case[0] != "llama"),
        *((name, {}, torch.bfloat16) for name in EXPERTS),
    ],
)
def test_published_weights_say_what_the_adapters_say(
    folders: Folders, batch: Any, name: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    model = load(folders[name], lora=LoRA(rank=2, **settings), dtype=dtype).eval()
    train_a_bit(model)
    merged = load(folders[name], dtype=dtype).eval()
    weights, before, own = ModuleWeights(model), logprobs(merged, batch), copy.deepcopy(model.state_dict())
    assert [(i.name, i.shape, i.dtype) for i in weights.metadata()] == [
        (n, tuple(p.shape), p.dtype) for n, p in merged.named_parameters()
    ]
    merged.load_state_dict({n: tensor.clone() for n, tensor in weights}, strict=False)
    assert all(torch.equal(value, own[n]) for n, value in model.state_dict().items())
    tolerance = 2e-5 if dtype == torch.float32 else 0.3  # adapters of linear layers are added in another place
    torch.testing.assert_close(logprobs(merged, batch), logprobs(model, batch), rtol=0, atol=tolerance)
    assert float((logprobs(merged, batch) - before).abs().max()) > 0.1


def learned(model: str, folder: Path, size: int, strategy: Any) -> None:
    """Learn eight additions by SGD and write the adapter."""

    class PlainSFT(PlainSGD, SFTModule):
        without_dropout = True

    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]
    module = PlainSFT(
        model, lr=0.01, loading=ModelLoading(attention="eager", gradient_checkpointing=True), lora=LoRA(rank=2)
    )
    trainer = data_runs.trainer(folder, devices=4 // size, strategy=strategy, max_epochs=1)
    trainer.fit(module, SFTDataModule(rows, micro_batch_size=size, shuffle=False))
    module.save_pretrained(folder, adapter=True)


def on_rank(folder: Path, model: str, place: str) -> None:
    """At ZeRO 3, with the experts in shards between their uses."""
    sharded = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    learned(model, Path(place), 2, RLHFDeepSpeedStrategy(stage=3, engine_configs={"policy": sharded}))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mixtral", "granitemoe"])  # gathered as a block, and weight by weight
def test_adapters_of_sharded_experts_learn_what_one_process_learns(folders: Folders, tmp_path: Path, name: str) -> None:
    learned(folders[name], tmp_path / "alone", 4, "auto")
    ranks.run("models.test_lora:on_rank", 2, tmp_path, model=folders[name], place=str(tmp_path / "ranks"))
    alone, sharded = (load_file(tmp_path / where / "adapter_model.safetensors") for where in ("alone", "ranks"))
    assert alone.keys() == sharded.keys()
    assert any("experts" in weight and bool(value.any()) for weight, value in alone.items() if "lora_B" in weight)
    for weight, value in alone.items():
        torch.testing.assert_close(sharded[weight], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arguments", [{"dropout": 0.1}, {"dora": True}])
def test_what_experts_cannot_have_is_refused(folders: Folders, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"train no experts \(LoRA\(experts=False\)\)"):
        load(folders["mixtral"], lora=LoRA(**arguments))
    load(folders["mixtral"], lora=LoRA(experts=False, **arguments))
