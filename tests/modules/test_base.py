"""PolicyModule: hyperparameters, building, precision, dropout, overridden methods."""

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import fit_run
from tiny_models import tiny_model

from rlhfkit import DPOModule, GRPOModule, Part, Stage


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


class Longer(DPOModule):
    """A user's class: an argument of its own, everything else handed on."""

    def __init__(self, *args: Any, extra: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def test_hyperparameters_are_attributes_and_in_checkpoints(tmp_path: Path) -> None:
    module = Longer(str(tiny_model(tmp_path / "model")), beta=0.2, lr=1e-3, precompute_ref_log_probs=True, extra=2.0)
    assert (module.beta, module.lr, module.precompute_ref_log_probs, module.hparams.extra) == (0.2, 1e-3, True, 2.0)
    copied = pickle.loads(pickle.dumps(module))
    assert (copied.beta, copied.lr, copied.hparams) == (0.2, 1e-3, module.hparams)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    module.configure_model()
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    loaded = Longer.load_from_checkpoint(tmp_path / "saved.ckpt", lr=1e-5)
    assert (loaded.beta, loaded.lr, loaded.hparams.lr, loaded.hparams.extra) == (0.2, 1e-5, 1e-5, 2.0)


# What a subclass or a part returns in place of what is asked for: the error names the method and what to return.


class Number(GRPOModule):
    def loss(self, batch: Any, out: Any) -> Any:
        return super().loss(batch, out).loss


class Forgets(GRPOModule):
    def prepare(self, experience: Any) -> Any:
        super().prepare(experience)


class Term(Part):
    def term(self, batch: Any, out: Any, old: Any) -> Any:
        return out.logprobs.mean()


class InPlace(Part):
    stage, reads, writes = Stage.SHAPE, ("rewards",), ("rewards",)

    def prepare(self, rows: Any) -> Any:
        rows.rewards.mul_(2.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": Number}, r"^Number\.loss returned Tensor: return rlhfkit\.LossOutput\(loss, "),
        ({"module": Forgets}, r"^Forgets\.prepare returned NoneType: return what super\(\)\.prepare\(\) returns"),
        ({"module_arguments": {"parts": [Term()]}}, r"^Term\.term returned Tensor: return rlhfkit\.LossOutput"),
        ({"module_arguments": {"parts": [InPlace()]}}, r"^InPlace\.prepare returned NoneType: return rows"),
    ],
)
def test_another_type_is_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fit_run(tmp_path, max_steps=1, **arguments)
