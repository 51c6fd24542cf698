"""Weights divided over ranks: training, saving and exporting equal one rank; what cannot be divided is refused.

Covers strategies/deepspeed/tensor_parallel.py.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from plain_sgd import PlainSGD
from rl_runs import SaveAt, setup_run
from safetensors.torch import load_file
from tiny_models import tiny_tokenizer
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhfkit import (
    EMA,
    DPOModule,
    HFExport,
    LoRA,
    PPOModule,
    PreferenceDataModule,
    RLHFDeepSpeedStrategy,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.distributed import tensor_part
from rlhfkit.models.lora import add_lora
from rlhfkit.rollout import ModuleWeights
from rlhfkit.strategies.deepspeed.tensor_parallel import plan_of, require_known_norm
from strategies import ranks, toys
from strategies.parity_cases import RANK, RANKS, Spy, weight_difference

# Norms are about 4; neighbouring fp32 numbers there are 4.8e-7 apart.
TOLERANCE = 1e-6
# Adam divides by the size of gradients, so that those of 1e-7 are rounded to other steps (of 1e-3).
ADAM_TOLERANCE = 5e-6
TWO_RANKS = ["dpo, stage 0", "dpo, stage 2", "ppo, stage 1", "ppo, stage 3", "lora, stage 1", "lora, stage 3"]
"""Each stage with another kind; SFT is trained at every stage by the runs that are resumed."""


def write(folder: Path) -> Path:
    """Models (normed queries and keys, a vocabulary that 2 does not divide) and data, in a folder of this rank."""
    folder = folder / f"rank{RANK}"
    folder.mkdir()
    sizes = toys.SIZES | {"vocab_size": 129, "intermediate_size": 48, "head_dim": 8, "max_position_embeddings": 128}
    for name, seed in (("model", 1), ("reference", 2)):
        config = Qwen3Config(**sizes, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn(parameter.shape)
            model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


class Watch(Spy):
    """Losses over all ranks, which weights are divided, and those that engines would get."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
        super().on_train_batch_end(trainer, module)
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        super().on_train_end(trainer, module)
        models = [list(child.parameters()) for child in module.children()]
        self.divided = [any(tensor_part(parameter) is not None for parameter in own) for own in models if own]
        if any("lora_" in name for name, _ in module.named_parameters()):  # engines get W + scale B A
            sent = {name: weight.detach().clone() for name, weight in ModuleWeights(module.policy)}
            self.weights |= {f"merged {name}": weight for name, weight in sent.items() if RANK == 0}

    def updates(self) -> list[float]:
        """The loss of each update: which rows are in which of its micro-batches depends on the number of ranks."""
        return [first + second for first, second in zip(self.losses[::2], self.losses[1::2], strict=True)]


class PlainSFT(PlainSGD, SFTModule):
    """SFT with SGD."""


class PlainAdam(SFTModule):
    """SFT with Adam, the optimizer whose state DeepSpeed converts."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.AdamW(self.parameter_groups(), lr=self.lr)


class PlainDPO(PlainSGD, DPOModule):
    """DPO with SGD."""


class PlainPPO(PlainSGD, PPOModule):
    """PPO with SGD."""


def run(
    kind: str, folder: Path, divided: dict[str, Any] | None = None, callbacks: Sequence[L.Callback] = (), **options: Any
) -> Watch:
    """Two updates of two micro-batches of four rows; or, of PPO, an iteration of 32 samples in two updates.

    ``divided``: arguments of the strategy; ``None``: plain Lightning on one rank.
    """
    number = 1 if divided is None else RANKS
    watch, model, path = Watch(), str(folder / "model"), options.pop("ckpt_path", None)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 1, **options}
    options |= {"callbacks": [watch, *callbacks], "strategy": "auto"}
    together = 1
    if divided is not None:
        options["strategy"] = RLHFDeepSpeedStrategy(**divided)
        together = divided.get("tensor_parallel_size", 1) * divided.get("sequence_parallel_size", 1)
    micro = {"micro_batch_size": (8 if kind == "ppo" else 4) * together // number}
    os.environ["WORLD_SIZE"] = str(number)  # Lightning deletes it when a fit ends
    if kind == "ppo":
        learn = {"module": PlainPPO, "module_arguments": {"lr": 0.02, "critic_lr": 0.02}, "data_arguments": micro}
        trainer, module, data, _ = setup_run(folder, **learn, devices=number, use_distributed_sampler=False, **options)
        trainer.fit(module, data, ckpt_path=path)
        return watch
    rows = [{"prompt": f"{i}+{i}=", "completion": "x" * (i % 5 + 1) + str(2 * i)} for i in range(16)]
    if kind == "dpo":
        module = PlainDPO(model, lr=0.05, ref_model=str(folder / "reference"))
        pairs = [
            {"prompt": r["prompt"], "chosen": r["completion"], "rejected": "y" * (i % 3 + 1)}
            for i, r in enumerate(rows)
        ]
        data = PreferenceDataModule(pairs, **micro)
    else:
        lora = LoRA(rank=3, init="gaussian") if kind == "lora" else None
        sgd = PlainSFT(model, lr=1.0 if lora else 0.05, lora=lora)
        module = PlainAdam(model, lr=1e-3) if kind == "adam" else sgd
        data = SFTDataModule(rows, **micro)
    toys.trainer(ranks=number, **options).fit(module, data, ckpt_path=path)
    return watch


def check_equal(found: Watch, plain: Watch, skipped: int = 0, tolerance: float = TOLERANCE) -> None:
    """Losses and norms after so many updates, and the weights in the end."""
    assert found.divided
    assert all(found.divided), "policy, critic and reference"
    assert found.updates() == pytest.approx(plain.updates()[skipped:], abs=TOLERANCE)
    for norms, expected in zip(found.norms[1::2], plain.norms[skipped:], strict=True):
        # Those of LoRA are about 10, where neighbouring fp32 numbers are 9.5e-7 apart.
        assert norms == pytest.approx(expected, abs=TOLERANCE, rel=3e-7)
    assert RANK > 0 or weight_difference(found.weights, plain.weights) <= tolerance


def equal_one_rank(folder: Path, name: str) -> None:
    """Two updates of two micro-batches, clipped; a reference model, a critic, weights sent to an engine."""
    own, kind = write(folder), name.partition(",")[0]
    plain = run(kind, own)
    check_equal(run(kind, own, {"stage": int(name[-1]), "tensor_parallel_size": 2}), plain)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name == "dpo, stage 2")) for name in TWO_RANKS]
)
def test_losses_norms_and_weights_equal_one_rank(name: str, tmp_path: Path) -> None:
    ranks.run(equal_one_rank, 2, tmp_path, name=name)


class Offload(L.Callback):
    """Moves weights and optimizer states away and back before each batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        trainer.strategy.training_states.offload_states()
        trainer.strategy.training_states.reload_states()


@ranks.on_two_ranks
def test_resuming_is_bitwise_and_exported_folders_hold_whole_weights_and_their_averages(
    folder: Path, model: str
) -> None:
    """With an average of the weights, exported; states of the resumed runs are moved around."""
    own = write(folder)
    plain = run("sft", own)
    expected = {name.removeprefix("policy."): weight for name, weight in plain.weights.items()}
    averages = []
    for stage in range(4):
        path, ends = folder / f"{stage}.ckpt", []
        for name, more in (("straight", [SaveAt(path, 2)]), ("resumed", [Offload()])):
            place = folder / f"{name} {stage}"
            average = EMA(0.5, export=HFExport(place / "average", every_n_epochs=None), validate=False)
            divided = {"stage": stage, "tensor_parallel_size": 2, "async_save": bool(stage % 2)}
            callbacks = [average, HFExport(place / "last", every_n_epochs=None), *more]
            ends.append(run("sft", own, divided, callbacks, ckpt_path=path if name == "resumed" else None))
            averages.append(load_file(place / "average" / "model.safetensors"))
        straight, resumed = ends
        check_equal(straight, plain)
        assert resumed.norms[1::2] == straight.norms[3::2], stage
        assert RANK > 0 or weight_difference(straight.weights, resumed.weights) == 0, stage
        exported = load_file(folder / f"straight {stage}" / "last" / "model.safetensors")
        assert weight_difference(averages[-2], averages[-1]) == 0, stage
        assert weight_difference(averages[-1], averages[0]) <= TOLERANCE, stage
        assert weight_difference(averages[-1], exported) > 0, stage
        if RANK == 0:
            assert weight_difference(exported, {name: expected[name] for name in exported}) <= TOLERANCE, stage


class SaveEpoch(L.Callback):
    """Saves a checkpoint at the end of each epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def save_epoch(folder: Path) -> None:
    """Of divided weights, at ZeRO 1 and 3."""
    own = write(folder)
    for stage in (1, 3):
        run("adam", own, {"stage": stage, "tensor_parallel_size": 2}, [SaveEpoch(folder / f"{stage}.ckpt")])


def four_equal_one(folder: Path, place: str) -> None:
    """Ranks that share tokens and weights; and the last two of three epochs, after what two ranks have saved."""
    own = write(folder)
    plain_dpo, plain = run("dpo", own), run("adam", own, max_epochs=3)
    check_equal(run("dpo", own, {"stage": 2, "tensor_parallel_size": 2, "sequence_parallel_size": 2}), plain_dpo)
    for stage in (1, 3):
        rest = {"ckpt_path": Path(place) / f"{stage}.ckpt", "max_epochs": 3}
        check_equal(run("adam", own, {"stage": stage, "tensor_parallel_size": 2}, **rest), plain, 2, ADAM_TOLERANCE)


@pytest.mark.distributed
def test_four_ranks_that_divide_tokens_and_weights_equal_one_rank(tmp_path: Path) -> None:
    """Also after resuming what two ranks have saved with the same size."""
    ranks.run(save_epoch, 2, tmp_path / "two")
    ranks.run(four_equal_one, 4, tmp_path / "four", place=str(tmp_path / "two"))


def shared_forwards(folder: Path, device: str) -> dict[str, float]:
    """How far weights are from plain Lightning's on the CPU, after passes that ranks on a device compute together."""
    own = write(folder)
    plain, found = run("sft", own).weights, {}
    ways = [{"sequence_parallel_size": 2, "sequence_parallel": kind} for kind in ("ulysses", "ring")]
    for way in (*ways, {"tensor_parallel_size": 2}):
        weights = run("sft", own, {"stage": 2} | way, accelerator="gpu" if device == "cuda" else "cpu").weights
        apart = weight_difference({name: weight.cpu() for name, weight in weights.items()}, plain) if RANK == 0 else 0.0
        found[str(way)] = apart
    return found


def test_16_bits_at_stage_0_are_refused() -> None:
    config = {"tensor_parallel": {}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    with pytest.raises(MisconfigurationException, match="use stage 1, 2 or 3"):
        require_known_norm("policy", config)
    require_known_norm("policy", config | {"zero_optimization": {"stage": 1}})
    require_known_norm("policy", config | {"bf16": {"enabled": False}})


# ---------------------------------------------------------------- plans

SIZES: dict[str, Any] = toys.SIZES | {"intermediate_size": 24}


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
