"""LoRA: what is trained, what the forward pass gives, switching it off, files, and merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from models.lora_cases import logprobs, train_a_bit
from rlhfkit.models import LoRA, ModelLoading, adapter_disabled, load_causal_lm, policy_output
from rlhfkit.models.lora import adapter_layers, has_adapter, save_adapter, save_initial_adapter
from rlhfkit.rollout import ModuleWeights

VARIANTS = [{}, {"dora": True}, {"rslora": True}, {"init": "orthogonal"}, {"targets": ("q_proj", "down_proj")}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


class TestTraining:
    """Adapters in the model."""

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_new_adapters_change_nothing_and_are_all_that_is_trained(
        self, folder: str, batch: Any, variant: dict[str, Any]
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
        self, folder: str, batch: Any, checkpointing: bool
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

    def test_a_users_own_peft_wrapper_works_the_same(self, folder: str, batch: Any) -> None:
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
    def test_targets_that_cannot_be_trained_are_refused(self, folder: str, target: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_causal_lm(folder, lora=LoRA(targets=(target,)))

    def test_what_does_not_go_together_says_so(self, folder: str) -> None:
        with pytest.raises(ValueError, match="give lora=LoRA"):
            load_causal_lm(folder, loading=ModelLoading(quantization="nf4"))
        with pytest.raises(ValueError, match=r"LoRA\.targets must be 'all-linear' or names of layers"):
            LoRA(targets=())


class TestReference:
    """The model is its own reference."""

    @pytest.mark.parametrize("dora", [False, True])
    def test_without_its_adapter_a_model_is_the_base_model(self, folder: str, batch: Any, dora: bool) -> None:
        model = load_causal_lm(folder, lora=LoRA(rank=4, dora=dora))
        train_a_bit(model)
        trained = logprobs(model, batch)
        with adapter_disabled(model):
            inside = logprobs(model, batch)
        assert torch.equal(inside, logprobs(load_causal_lm(folder), batch))
        assert torch.equal(logprobs(model, batch), trained)
        assert not torch.allclose(trained, inside, atol=0.1)

    def test_adapters_are_back_after_an_error(self, folder: str, batch: Any) -> None:
        model = load_causal_lm(folder, lora=LoRA(rank=4))
        train_a_bit(model)
        before = logprobs(model, batch)
        with pytest.raises(KeyError), adapter_disabled(model):
            raise KeyError
        assert torch.equal(logprobs(model, batch), before)

    def test_a_model_without_adapters_has_none_to_switch_off(self, folder: str) -> None:
        model = load_causal_lm(folder)
        assert not has_adapter(model)
        with pytest.raises(ValueError, match="has no adapters"), adapter_disabled(model):
            pass

    @pytest.mark.parametrize("dora", [False, True])
    def test_training_a_trained_adapter_further_refers_to_where_it_was(
        self, folder: str, batch: Any, tmp_path: Path, dora: bool
    ) -> None:
        first = load_causal_lm(folder, lora=LoRA(rank=4, dora=dora))
        train_a_bit(first)
        save_adapter(first, tmp_path, first.state_dict())
        model = load_causal_lm(str(tmp_path))
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        save_initial_adapter(model)
        assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        train_a_bit(model, seed=1)
        assert not torch.allclose(logprobs(model, batch), logprobs(first, batch), atol=0.1)
        with adapter_disabled(model):
            assert torch.equal(logprobs(model, batch), logprobs(first, batch))
        assert not any("start" in name for name, _ in ModuleWeights(model))


class TestFiles:
    """Adapters on disk."""

    @pytest.mark.parametrize("dora", [False, True])
    def test_a_saved_adapter_is_what_peft_and_we_load(
        self, folder: str, batch: Any, tmp_path: Path, dora: bool
    ) -> None:
        import peft

        model = load_causal_lm(folder, lora=LoRA(rank=4, alpha=6, dora=dora))
        train_a_bit(model)
        save_adapter(model, tmp_path, model.state_dict())
        expected = logprobs(model, batch)
        assert torch.equal(logprobs(load_causal_lm(str(tmp_path)), batch), expected)
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
        with torch.no_grad():
            logits = theirs(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        chosen = logits[:, :-1].log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        assert torch.allclose(chosen * batch.attention_mask[:, 1:], expected, atol=1e-5)

    def test_what_peft_has_saved_is_trained_on(self, folder: str, batch: Any, tmp_path: Path) -> None:
        import peft

        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        theirs = peft.get_peft_model(load_causal_lm(folder), config)
        train_a_bit(theirs)
        theirs.save_pretrained(tmp_path)
        model = load_causal_lm(str(tmp_path))
        assert torch.equal(logprobs(model, batch), logprobs(theirs, batch))
        assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2 * 2

    def test_adapters_with_more_than_lora_are_refused(self, folder: str, tmp_path: Path) -> None:
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


class TestPublishing:
    """Weights with the adapters added."""

    @pytest.mark.parametrize("variant", VARIANTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_published_weights_are_those_that_peft_merges(
        self, folder: str, variant: dict[str, Any], dtype: torch.dtype
    ) -> None:
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

    def test_convolutions_of_gpt2_are_merged_the_right_way_round(self, tmp_path: Path, batch: Any) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
            tmp_path
        )
        for dora in (False, True):
            model = load_causal_lm(str(tmp_path), lora=LoRA(rank=2, dora=dora, targets=("c_attn", "c_fc"))).eval()
            train_a_bit(model)
            merged = load_causal_lm(str(tmp_path)).eval()
            merged.load_state_dict(dict(ModuleWeights(model)), strict=False)
            assert torch.allclose(logprobs(merged, batch), logprobs(model, batch), atol=1e-5)
