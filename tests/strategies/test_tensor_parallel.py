"""Weights divided over ranks: training, saving and exporting equal one rank; what cannot be divided is refused.

Covers strategies/deepspeed/tensor_parallel.py, with tensor_cases.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors.torch import load_file
from torch import nn
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)
from transformers.models.gpt2 import GPT2LMHeadModel
from transformers.models.mixtral import MixtralForCausalLM

from rlhfkit.models.lora import LoRA, add_lora
from rlhfkit.strategies.deepspeed.tensor_parallel import plan_of, require_known_norm
from strategies import ranks

# Norms are about 4; neighbouring fp32 numbers there are 4.8e-7 apart.
TOLERANCE = 1e-6
# Adam divides by the size of gradients, so that those of 1e-7 are rounded to other steps (of 1e-3).
ADAM_TOLERANCE = 5e-6
KINDS = ["sft", "dpo", "ppo", "lora"]
TWO_RANKS = ["dpo, stage 0", "dpo, stage 2", "ppo, stage 1", "ppo, stage 3", "lora, stage 1", "lora, stage 3"]
"""Each stage with another kind; SFT is trained at every stage by the runs that are resumed."""


def trained(folder: Path, number: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Losses and norms of each run, and its weights."""
    own = folder / f"{number} ranks, {', '.join(cases)}"
    reports = ranks.run("strategies.tensor_cases:train", number, own, cases=cases, place=str(folder))
    for report in reports[1:]:
        assert report == reports[0], (
            "losses are averaged over ranks, and norms are of all parts: everybody saw the same"
        )
    return {
        name: values | {"weights": torch.load(folder / f"{name}, {number} ranks.pt")}
        for name, values in reports[0].items()
    }


def check_equal(run: dict[str, Any], one: dict[str, Any]) -> None:
    assert not any(one["divided"].values())
    assert run["divided"].keys() == one["divided"].keys()
    assert all(run["divided"].values()), "policy, critic and reference"
    assert run["losses"] == pytest.approx(one["losses"], abs=TOLERANCE)
    # Those of LoRA are about 10, where neighbouring fp32 numbers are 9.5e-7 apart.
    assert run["norms"] == pytest.approx(one["norms"], abs=TOLERANCE, rel=3e-7)
    assert run["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.distributed
class TestTwoRanks:
    """Every rank has half of the weights."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("tensor")

    @pytest.fixture(scope="class")
    def one(self, folder: Path) -> dict[str, Any]:
        return trained(folder, 1, {kind: {"stage": 0} for kind in KINDS})

    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == "dpo, stage 2")) for name in TWO_RANKS]
    )
    def test_losses_norms_and_weights_equal_one_rank(self, name: str, folder: Path, one: dict[str, Any]) -> None:
        """Two updates of two micro-batches, clipped; a reference model, a critic, weights sent to an engine."""
        two = trained(folder, 2, {name: {"stage": int(name[-1]), "tensor_parallel_size": 2}})
        check_equal(two[name], one[name.partition(",")[0]])

    @pytest.fixture(scope="class")
    def resumed(self, folder: Path) -> dict[str, Any]:
        report: dict[str, Any] = ranks.run("strategies.tensor_cases:resume", 2, folder / "resume", place=str(folder))[0]
        return report

    @pytest.mark.parametrize("stage", range(4))
    def test_resuming_is_bitwise_and_exported_folders_hold_whole_weights_and_their_averages(
        self, stage: int, folder: Path, one: dict[str, Any], resumed: dict[str, Any]
    ) -> None:
        run, alone = resumed[str(stage)], one["sft"]
        assert all(run["divided"].values())
        assert run["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE)
        assert run["norms"] == pytest.approx(alone["norms"], abs=TOLERANCE)
        exported, average, last, at_stage_0 = (
            load_file(folder / name / "model.safetensors")
            for name in (
                f"straight {stage}",
                f"straight {stage} average",
                f"resumed {stage} average",
                "straight 0 average",
            )
        )
        own = {name.removeprefix("policy."): weight for name, weight in alone["weights"].items()}
        assert average.keys() == last.keys() == exported.keys() <= own.keys()
        assert any(not torch.equal(average[name], exported[name]) for name in average)
        for name, weight in exported.items():
            torch.testing.assert_close(weight, own[name], rtol=0, atol=TOLERANCE)
            assert torch.equal(average[name], last[name])
            torch.testing.assert_close(average[name], at_stage_0[name], rtol=0, atol=TOLERANCE)

    def test_four_ranks_that_divide_tokens_and_weights_equal_one_rank(self, folder: Path, one: dict[str, Any]) -> None:
        """Also after resuming what two ranks have saved with the same size."""
        place = folder / "epochs"
        straight = ranks.run("strategies.tensor_cases:epochs", 2, place / "ranks", place=str(place))[0]
        cases: dict[str, Any] = {"dpo": {"stage": 2, "tensor_parallel_size": 2, "sequence_parallel_size": 2}}
        for stage in (1, 3):
            rest = {"ckpt_path": str(place / f"stage {stage}.ckpt"), "max_epochs": 3}
            cases[f"adam, stage {stage}"] = {"stage": stage, "tensor_parallel_size": 2, "options": rest}
        four = trained(folder, 4, cases)
        check_equal(four["dpo"], one["dpo"])
        weights = torch.load(place / "straight.pt")
        for stage in (1, 3):
            run = four[f"adam, stage {stage}"]
            assert run["losses"] == pytest.approx(straight["losses"][2:], abs=TOLERANCE)
            assert run["norms"] == pytest.approx(straight["norms"][2:], abs=TOLERANCE)
            for name, weight in weights.items():
                torch.testing.assert_close(run["weights"][name], weight, rtol=0, atol=ADAM_TOLERANCE)


def test_16_bits_at_stage_0_are_refused() -> None:
    config = {"tensor_parallel": {}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    with pytest.raises(MisconfigurationException, match="use stage 1, 2 or 3"):
        require_known_norm("policy", config)
    require_known_norm("policy", config | {"zero_optimization": {"stage": 1}})
    require_known_norm("policy", config | {"bf16": {"enabled": False}})


# ---------------------------------------------------------------- plans

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes)))


def with_adapters(**changes: Any) -> nn.Module:
    model = llama()
    add_lora(model, LoRA(rank=2, **changes), base="llama")
    return model


def with_an_unplanned_weight() -> nn.Module:
    model: Any = llama()
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(4))
    return model


def with_another_kind_of_layer() -> nn.Module:
    model: Any = llama()
    model.model.layers[0].mlp.up_proj = nn.Identity()
    return model


def quantised() -> nn.Module:
    model = llama()
    first: Any = next(model.parameters())
    first.quant_state = object()
    return model


def without_a_plan() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))


def mixture() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))


def with_joined_layers() -> nn.Module:
    return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0, bos_token_id=0, eos_token_id=0))


REFUSED: list[tuple[Callable[[], nn.Module], int, str]] = [
    (without_a_plan, 2, "GPT2LMHeadModel has no base_model_tp_plan"),
    (mixture, 2, "MixtralModel is a mixture of experts"),
    (with_joined_layers, 2, "has the styles ['colwise_gather_output', 'rowwise_split_input']"),
    (llama, 4, "4 attention heads and 2 key-value heads, which the size 4 does not divide"),
    (lambda: llama(intermediate_size=25), 2, "has 25 features to divide"),
    (lambda: with_adapters(dora=True), 2, "lora_magnitude_vector"),
    (lambda: with_adapters(dropout=0.1), 2, "have dropout"),
    (quantised, 2, "is quantised"),
    (with_an_unplanned_weight, 2, "does not say what becomes of layers.1.self_attn.sinks"),
    (with_another_kind_of_layer, 2, "layers.0.mlp.up_proj is a Identity"),
]


@pytest.mark.parametrize(("make", "size", "reason"), REFUSED)
def test_what_cannot_be_divided_exactly_is_refused_with_what_to_do(
    make: Callable[[], nn.Module], size: int, reason: str
) -> None:
    with pytest.raises(MisconfigurationException, match="Use tensor_parallel_size=1") as error:
        plan_of("policy", make(), size)
    assert "'policy'" in str(error.value)
    assert reason in str(error.value)
