"""What all modules share."""

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from rlhfkit import GRPOModule


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> GRPOModule:
    module = GRPOModule(str(tiny_model(tmp_path_factory.mktemp("model"))), kl_coef=0.1)
    module.configure_model()
    return module


def test_half_precision_leaves_the_frequencies_of_rotary_embeddings_alone(module: GRPOModule) -> None:
    frequencies = {name: buffer.clone() for name, buffer in module.named_buffers()}
    assert frequencies
    module.to(torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in module.parameters())
    for name, buffer in module.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, frequencies[name])
    module.to(torch.float32)


def test_building_twice_builds_once(module: GRPOModule) -> None:
    policy, reference = module.policy, module.reference
    module.configure_model()
    assert module.policy is policy
    assert module.reference is reference
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_the_tokenizer_is_the_models(module: GRPOModule, tmp_path: Path) -> None:
    assert module.tokenizer("1+2=")["input_ids"] == [20, 14, 21, 32]
    assert module.save_pretrained(tmp_path / "saved").is_dir()


def test_dropout_is_off_where_ratios_are_compared(tmp_path: Path) -> None:
    from tiny_models import tiny_tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.5, resid_pdrop=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    module = GRPOModule(str(tmp_path))
    module.configure_model()
    ids = torch.tensor([[5, 9, 20, 33, 7]])
    assert module.policy.training
    assert torch.equal(module.policy(input_ids=ids).logits, module.policy(input_ids=ids).logits)
