"""Gradients that the output layer computes in the forward pass, against a backward pass through it. Covers forward.py.

In float64 the two differ by rounding of 1e-15 per operation; in float32 log-probs agree to a few units in the last
place (1e-6 of a log-prob) and gradients to 1e-5 of the largest one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import tiny_model
from torch import Tensor, nn

from rlhfkit import LoRA
from rlhfkit.data import Experience
from rlhfkit.losses import dapo_loss, entropy_bonus
from rlhfkit.losses.fused_head import tiles
from rlhfkit.models import HeadLoss, PolicyOutput, load_causal_lm, policy_output
from rlhfkit.models.heads import add_value_head

from .test_forward import experience
from .test_output_logits import COMMON

LENGTHS = [(3, 5), (7, 1), (1, 9), (4, 4)]  # 19 tokens are selected
TOKENS = 19


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[5, TOKENS], ids=["four blocks", "one block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a block of logits of 128 float64 numbers each."""
    monkeypatch.setitem(tiles._BLOCK_BYTES, "cpu", request.param * 128 * 8)
    return request.param


def token_loss(batch: Experience) -> Any:
    """A clipped surrogate in a later update with a KL penalty and an entropy bonus: of each token alone."""
    old = torch.where(batch.action_mask, -4.0, 0.0).double()
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0]).double()

    def loss(out: PolicyOutput) -> Tensor:
        mask = batch.action_mask
        policy = dapo_loss(out.logprobs, old, advantages, mask, ref_logprobs=old - 0.1, kl_coef=0.1).loss
        return policy if out.entropy is None else policy + entropy_bonus(out.entropy, mask, coef=0.3).loss

    return loss


def pair_loss(batch: Experience) -> Any:
    """A loss of whole sequences."""

    def loss(out: PolicyOutput) -> Tensor:
        sums = out.logprobs.sum(-1)
        return -nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).mean()

    return loss


def gradients(
    model: Any, batch: Experience, head_loss: HeadLoss | None, loss: Any, **arguments: Any
) -> tuple[PolicyOutput, list[Tensor]]:
    """Output and gradients after two micro-batches whose losses are scaled, as for a sum over micro-batches."""
    model.zero_grad()
    for scale in (0.25, 0.75):
        out = policy_output(model, batch, batch.action_mask, head_loss=head_loss, **arguments)
        total = loss(out)
        if out.head_gradient is not None:
            total = total + out.head_gradient
        if out.values is not None:
            total = total + out.values.square().sum()
        (scale * total).backward()
    return out, [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check(model: Any, batch: Experience, *, single: bool = True, scope: Any = "token", **arguments: Any) -> None:
    """Both ways give the same loss, log-probs and gradients; ``single``: the gradients were computed in forward."""
    loss = (token_loss if scope == "token" else pair_loss)(batch)
    expected, wanted = gradients(model, batch, None, loss, **arguments)
    got, found = gradients(model, batch, HeadLoss(loss, scope), loss, **arguments)
    assert expected.head_gradient is None
    assert (got.head_gradient is not None) == single
    assert got.logprobs.requires_grad is not single
    exact = next(model.parameters()).dtype == torch.float64
    bounds = {"rtol": 1e-11, "atol": 1e-13} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got.logprobs.detach(), expected.logprobs.detach(), **bounds)
    assert len(found) == len(wanted) > 0
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            mine, other, rtol=bounds["rtol"], atol=bounds["atol"] * float(other.abs().max()) * 10
        )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("entropy", [False, True])
def test_token_losses_have_the_same_gradients(folder: Path, block: int, entropy: bool, packed: bool) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float64)
    check(model, experience(LENGTHS), entropy=entropy, temperature=0.7, packed=packed)


def test_in_float32_they_agree_to_rounding(folder: Path) -> None:
    check(load_causal_lm(str(folder)), experience(LENGTHS), entropy=True)


def test_losses_of_sequences_have_too_where_all_tokens_fit_one_block(folder: Path, block: int) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float64)
    check(model, experience(LENGTHS), scope="batch", single=block == TOKENS)


@pytest.mark.parametrize(
    "config",
    [
        hf.Gemma2Config(**COMMON, final_logit_softcapping=3.0),
        hf.CohereConfig(**COMMON | {"tie_word_embeddings": True}, logit_scale=0.25),
        hf.LlamaConfig(**COMMON),
    ],
    ids=["soft cap", "scale, tied", "bias"],
)
def test_caps_scales_and_biases_of_logits(tmp_path: Path, config: Any, block: int) -> None:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float64)
    if config.model_type == "llama":
        model.get_output_embeddings().bias = nn.Parameter(torch.randn(COMMON["vocab_size"], dtype=torch.float64))
    check(model, experience(LENGTHS), entropy=True)


def test_a_frozen_output_layer_under_adapters(folder: Path, block: int) -> None:
    check(load_causal_lm(str(folder), dtype=torch.float64, lora=LoRA(rank=2)), experience(LENGTHS))


class Twice(nn.Linear):
    """An output layer that is not plain."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def test_an_output_layer_with_code_of_its_own_gives_full_logits(folder: Path) -> None:
    model: Any = load_causal_lm(str(folder), dtype=torch.float64)
    model.get_output_embeddings().__class__ = Twice
    check(model, experience(LENGTHS), single=False)


def test_values_of_a_shared_backbone_keep_their_gradient(folder: Path, block: int) -> None:
    model = load_causal_lm(str(folder), dtype=torch.float64)
    add_value_head(model)
    nn.init.normal_(model.value_head.weight)
    check(model.double(), experience(LENGTHS), entropy=True, values=True)


def test_float16_and_no_grad_keep_the_backward_pass(folder: Path) -> None:
    batch, model = experience(LENGTHS), load_causal_lm(str(folder))
    loss = HeadLoss(token_loss(batch), "token")
    with torch.autocast("cpu", dtype=torch.float16):
        half = policy_output(model, batch, batch.action_mask, head_loss=loss)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        brain = policy_output(model, batch, batch.action_mask, head_loss=loss)
    with torch.no_grad():
        none = policy_output(model, batch, batch.action_mask, head_loss=loss)
    assert half.head_gradient is None
    assert half.logprobs.requires_grad
    assert brain.head_gradient is not None
    assert none.head_gradient is None


def test_a_batch_without_tokens_or_a_loss_without_gradient_gives_zeros(folder: Path) -> None:
    batch, model = experience(LENGTHS), load_causal_lm(str(folder))
    for mask, loss in (
        (torch.zeros_like(batch.action_mask), token_loss(batch)),
        (batch.action_mask, lambda out: out.logprobs.detach().sum()),
    ):
        out = policy_output(model, batch, mask, head_loss=HeadLoss(loss, "token"))
        assert out.head_gradient is not None
        assert out.head_gradient.item() == 0.0
        out.head_gradient.backward()
        assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
        with pytest.raises(RuntimeError, match="second time"):
            out.head_gradient.backward(retain_graph=True)
