"""Which parameters are embeddings, heads, matrices, vectors or stacks, and the groups that options make of them."""

from typing import Any

import pytest
from strategies.toys import save_tiny_mixtral
from tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

from rlhfkit.models import LoRA, load_causal_lm
from rlhfkit.models.heads import add_value_head, load_scalar_model
from rlhfkit.modules.optimizers.groups import KINDS, check_parameter_options, divide_groups, kinds_of


def by_kind(child: nn.Module) -> dict[str, set[str]]:
    """Last parts of the names of parameters, by kind."""
    kinds = kinds_of(child)
    found: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for name, parameter in child.named_parameters():
        found[kinds[id(parameter)]].add(name.removesuffix(".weight").rpartition(".")[2])
    return {kind: names for kind, names in found.items() if names}


def test_parameters_are_sorted_by_what_they_are(tmp_path: Any) -> None:
    tiny_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    add_value_head(model)
    found = by_kind(model)
    assert found["embeddings"] == {"embed_tokens"}
    assert found["heads"] == {"value_head"}, "the output layer is the embeddings"
    assert found["matrices"] >= {"q_proj", "o_proj", "down_proj"}
    assert all("norm" in name or "bias" in name or name.endswith("proj") for name in found["vectors"])
    assert by_kind(load_scalar_model(str(tmp_path / "model")))["heads"] == {"score"}
    save_tiny_mixtral(tmp_path / "experts")
    experts = by_kind(AutoModelForCausalLM.from_pretrained(tmp_path / "experts"))
    assert experts["heads"] == {"lm_head"}
    assert experts["stacks"] == {"gate_up_proj", "down_proj"}, "torch's Muon takes single matrices only"


def test_of_a_model_with_adapters_the_adapters_are_matrices_and_a_trained_score_a_head(tmp_path: Any) -> None:
    folder, lora = str(tiny_model(tmp_path)), LoRA(rank=2)
    for model, heads in ((load_causal_lm(folder, lora=lora), 0), (load_scalar_model(folder, lora=lora), 1)):
        kinds, trained = kinds_of(model), {name for name, one in model.named_parameters() if one.requires_grad}
        adapters = {name for name in trained if "lora_" in name}
        assert len(adapters) > 8
        assert len(trained - adapters) == heads
        for name in trained:
            assert kinds[id(model.get_parameter(name))] == ("matrices" if name in adapters else "heads"), name


class Pair(nn.Module):
    """A policy with all kinds, and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.ModuleDict(
            {"wte": nn.Embedding(5, 3), "h": nn.Linear(3, 3), "conv": nn.Conv1d(3, 3, 2), "lm_head": nn.Linear(3, 5)}
        )
        self.critic = nn.ModuleDict({"h": nn.Linear(3, 3), "score": nn.Linear(3, 1)})


def groups_of(pair: Pair) -> list[dict[str, Any]]:
    children = dict(pair.named_children())
    return [{"params": list(child.parameters()), "name": name} for name, child in children.items()]


def test_the_most_specific_option_wins_and_groups_stay_whole_elsewhere() -> None:
    pair = Pair()
    options = {"heads": {"lr": 1.0, "weight_decay": 0.1}, "critic": {"lr": 2.0}, "critic.heads": {"lr": 3.0}}
    groups = divide_groups(pair, groups_of(pair), options, by_kind=False)
    shown = {group["name"]: (len(group["params"]), group.get("lr"), group.get("weight_decay")) for group in groups}
    assert shown == {
        "policy": (5, None, None),
        "policy.heads": (2, 1.0, 0.1),
        "critic": (2, 2.0, None),
        "critic.heads": (2, 3.0, 0.1),
    }
    ids = sorted(id(parameter) for group in groups for parameter in group["params"])
    assert ids == sorted(map(id, pair.parameters())), "each parameter is in one group"
    assert divide_groups(pair, groups_of(pair), {}, by_kind=False) == groups_of(pair)


def test_every_group_has_one_kind_where_the_optimizer_asks_for_it() -> None:
    pair = Pair()
    groups = divide_groups(pair, groups_of(pair), {"stacks": {"lr": 0.5}}, by_kind=True)
    assert {(group["name"], len(group["params"])) for group in groups} == {
        ("policy.embeddings", 1), ("policy.matrices", 1), ("policy.stacks", 1), ("policy.vectors", 2),
        ("policy.heads", 2), ("critic.matrices", 1), ("critic.vectors", 1), ("critic.heads", 2),
    }  # fmt: skip
    assert [group["lr"] for group in groups if "lr" in group] == [0.5]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"heads": {"beta": 1}}, ValueError, "may set lr and weight_decay"),
        ({"heads": {}}, ValueError, "may set lr and weight_decay"),
        ({"heads": {"lr": 0}}, ValueError, "above 0"),
        ({"heads": {"weight_decay": float("nan")}}, ValueError, "weight_decay"),
        ({"critic.head": {"lr": 1.0}}, ValueError, "child.kind with a kind of embeddings"),
        ({"heads": 1e-3}, TypeError, "must hold settings by kind or child"),
    ],
)
def test_options_are_checked_when_given(options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        check_parameter_options(options)


def test_a_name_of_no_trained_parameter_is_an_error_that_lists_what_there_is() -> None:
    pair = Pair()
    with pytest.raises(ValueError, match=r"critics, of which no parameter is trained.*policy, critic"):
        divide_groups(pair, groups_of(pair), {"critics": {"lr": 1.0}}, by_kind=False)
