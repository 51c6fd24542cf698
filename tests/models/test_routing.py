"""The choice of experts, recorded and replayed, against a model whose routers are told by hand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.conftest import Folders
from rlhfkit.models import ModelLoading, load_causal_lm, policy_output
from rlhfkit.models.load import disable_dropout
from rlhfkit.models.routing import attach_routing

MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "glm4_moe"]


class Rows:
    """Three sequences, of which two share their beginning."""

    def __init__(self, rows: slice = slice(None)) -> None:
        ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 20, 21, 0, 0], [30, 31, 32, 33, 0, 0, 0]])
        self.input_ids = ids[rows]
        self.attention_mask = self.input_ids > 0


def output(model: nn.Module, routing: Any = None) -> Any:
    return policy_output(model, Rows(), Rows().attention_mask[:, 1:], routing=routing)


def load(folder: str, attention: str | None = None) -> Any:
    model = load_causal_lm(folder, dtype=torch.float32, loading=ModelLoading(attention=attention))
    disable_dropout(model)
    return model


def updated(model: nn.Module) -> nn.Module:
    """The model after a change of its routers that moves tokens to other experts."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate.weight" in name:
                weight.add_(0.7 * torch.randn_like(weight))
    return model


@pytest.mark.parametrize("name", MIXTURES)
def test_only_the_choice_is_replayed(name: str, folders: Folders) -> None:
    model = load(folders[name])
    free = output(model)
    attach_routing(model)
    recorded = output(model, True)
    assert torch.equal(recorded.logprobs, free.logprobs)
    same = output(model, recorded.routing)
    assert torch.equal(same.logprobs, free.logprobs)
    assert float(same.rerouted) == 0.0
    free = output(updated(model))
    replayed = output(model, recorded.routing)
    assert float(replayed.rerouted) > 0.05
    assert float((replayed.logprobs - free.logprobs).abs().max()) > 1e-3
    assert torch.equal(output(model, torch.zeros_like(recorded.routing)).logprobs, free.logprobs)


def told_by_hand(router: nn.Module, experts: Tensor) -> Any:
    """Mixtral's router, which was given the choice: the probabilities of the chosen experts, made to sum to one."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden.flatten(0, -2) @ router.weight.T
        scores = logits.exp()[torch.arange(len(experts))[:, None], experts]
        return logits, scores / scores.sum(-1, keepdim=True), experts

    return forward


def test_replayed_outputs_and_gradients_are_those_of_routers_told_by_hand(folders: Folders) -> None:
    model = load(folders["mixtral"])
    by_hand = load(folders["mixtral"], attention="sdpa")
    attach_routing(model)
    with torch.no_grad():
        routing = output(model, True).routing
    updated(model)
    by_hand.load_state_dict(model.state_dict())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    replayed = output(model, routing)
    output(model)  # another forward pass before the layers are computed again
    replayed.logprobs.sum().backward()
    total = torch.zeros(())
    for row, length in enumerate(Rows().attention_mask.sum(-1).tolist()):
        experts = routing[row, : length - 1].long().unflatten(-1, (2, -1)) - 1
        for layer, decoder in enumerate(by_hand.model.layers):
            decoder.mlp.gate.forward = told_by_hand(decoder.mlp.gate, experts[:, layer])
        ids = Rows().input_ids[row : row + 1, :length]
        logprobs = by_hand(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        torch.testing.assert_close(replayed.logprobs[row, : length - 1], logprobs, atol=1e-5, rtol=0.0)
        total = total + logprobs.sum()
    total.backward()
    theirs = dict(by_hand.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name].grad, atol=2e-5, rtol=2e-5)  # sums of 13 tokens


def test_what_cannot_be_replayed_is_refused(folders: Folders) -> None:
    with pytest.raises(ValueError, match="has no routers whose choice can be replayed"):
        attach_routing(load(folders["qwen3"]))
    model = load(folders["mixtral"])
    with pytest.raises(ValueError, match="needs attach_routing"):
        output(model, True)
    padded = load(folders["mixtral"], attention="sdpa")
    attach_routing(padded)
    with pytest.raises(ValueError, match="needs attach_routing\\(\\) and our packed attention"):
        output(padded, True)


def test_a_copy_of_the_model_keeps_its_own_routers(folders: Folders) -> None:
    model = load(folders["mixtral"])
    attach_routing(model)
    routing, before = output(model, True).routing, output(model).logprobs
    other = updated(copy.deepcopy(model))
    replayed = output(other, routing)
    assert float(replayed.rerouted) > 0.0
    assert torch.equal(output(model, routing).logprobs, before)
