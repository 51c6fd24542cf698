"""Every argument of every module: changed, it changes what is learned, logged or built, or a reason is given."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L
import pytest
import torch
from torch import Tensor

import rlhfkit.modules
from rlhfkit import (
    BCOModule,
    CPOModule,
    DFTModule,
    DistillationModule,
    DPOModule,
    GRPOModule,
    KTOModule,
    LoRA,
    OnlineDPOModule,
    OnPolicyDistillationModule,
    ORPOModule,
    Part,
    PPOModule,
    ProcessRewardModule,
    RewardModule,
    SFTModule,
    SimPOModule,
)

from . import learning
from .table import Change, Rows, Unseen, arguments_of, check_none_is_ignored, seen_twice

LEAST: dict[str, Any] = {"model": "@model", "lr": 0.03}
BITS = Unseen("needs the extra qlora; tests/modules/test_lora.py compares with full weights where it is installed")
VISION = Unseen("needs a model that sees images: tests/models/test_vision.py")
PASSES = Unseen("forward passes without gradient: tests/modules/on_policy/preparation/test_rewards.py")
LIGER = Unseen("needs a GPU and the extra liger: tests/models/test_liger.py")


def by_rewards(rewards: Tensor, group: Tensor) -> Tensor:
    """An estimator of a user's own."""
    return rewards - 0.3


class Watches(Part):
    """A feature of a user's own."""

    def observe(self, batch: Any, out: Any, old: Tensor) -> dict[str, Tensor]:
        return {"mine/rows": torch.tensor(float(len(batch)))}


POLICY: dict[str, Change | Unseen] = {
    "model": Change("@other", built=True),
    "lr": Change(0.01, built=True),
    "optimization.weight_decay": Change(0.5, built=True),
    "optimization.betas": Change((0.5, 0.5), built=True),
    "optimization.warmup_steps": Change(2, built=True),
    "optimization.optimizer": Change("sgd", built=True),
    "optimization.optimizer_arguments": Change({"eps": 1e-3}, built=True),
    "optimization.parameter_options": Change({"embeddings": {"lr": 0.5}}, built=True),
    "optimization.lr_schedule": Change("linear"),
    "optimization.warmup_ratio": Change(0.5),
    "optimization.min_lr_ratio": Change(0.5, given={"optimization.lr_schedule": "linear"}, around={"epochs": 2}),
    "optimization.decay_ratio": Change(1.0, given={"optimization.lr_schedule": "wsd"}, around={"epochs": 2}),
    "loading.gradient_checkpointing": Change(True, built=True),
    "lora": Change(LoRA(rank=2), built=True),
    "loading.attention": Change("sdpa", built=True),
    "loading.offload_activations": Change(True, given={"loading.gradient_checkpointing": True}, built=True),
    "loading.tiled_mlp": Change(True, built=True),
    "loading.liger_kernels": LIGER,
    "loading.quantization": BITS,
    "loading.train_vision": VISION,
    "loading.max_tokens_per_forward": PASSES,
    "loading.trust_remote_code": Change(True, given={"model": "@remote"}, built=True),
    "parts": Change([f"{Watches.__module__}.Watches"]),
}
REFERENCE: dict[str, Change | Unseen] = {
    "ref_model": Change("@other"),
    "precompute_ref_log_probs": Change(True),
}
PAIRS: dict[str, Change | Unseen] = {"beta": Change(0.7), "label_smoothing": Change(0.2), "nll_coef": Change(0.5)}
ON_POLICY: dict[str, Change | Unseen] = {
    "advantages": Change(by_rewards),
    "policy_loss": Change("cispo_loss"),
    "policy_loss_arguments": Change({"dual_clip": 1.01}, given={"policy_loss": "ppo_loss"}),
    "clip_low": Change(0.001),
    "clip_high": Change(0.001),
    "aggregation": Change("sequence-mean-token-sum"),
    "kl_coef": Change(0.3),
    "parts": Change([f"{Watches.__module__}.Watches"]),
}
GROUPS: dict[str, Change | Unseen] = {
    "preset": Change("dppo"),
    "advantage_scale": Change("batch"),
}
OF_REWARDS = {"advantages"}


def rewarded(row: Change | Unseen) -> Change:
    """The same where rewards have a part in distillation."""
    assert isinstance(row, Change)
    return dataclasses.replace(row, given={**row.given, "reward_coef": 0.5})


AS_KTO = Unseen("handed to the class that it is derived from, which does with it what it does there")
AS_GRPO = Unseen("handed to OnPolicyModule, which does with it what it does for GRPOModule")
PPO: dict[str, Change | Unseen] = {
    "critic": Change("@other", built=True),
    "critic_lr": Change(1e-3, built=True),
    "gamma": Change(0.5),
    "lam": Change(0.3),
    "whiten_advantages": Change(False),
    "kl_coef": Change(0.3, around={"epochs": 2}),  # in the first iteration the policy is the reference
}
SCALAR = POLICY | {"head_std": Change(0.5)}
TABLE: dict[type, tuple[str, Rows]] = {
    SFTModule: ("texts", POLICY),
    DFTModule: ("texts", POLICY),
    DPOModule: (
        "pairs",
        POLICY
        | REFERENCE
        | PAIRS
        | {
            "loss_type": Change("ipo"),
            "divergence": Change("forward_kl"),
            "ld_alpha": Change(0.1),
            "use_weighting": Change(True),
            "reference_free": Change(True),
        },
    ),
    SimPOModule: ("pairs", POLICY | PAIRS | {"gamma": Change(0.3), "alpha": Change(0.3)}),
    CPOModule: ("pairs", POLICY | PAIRS | {"loss_type": Change("hinge")}),
    ORPOModule: ("pairs", POLICY | {"beta": Change(0.7)}),
    KTOModule: (
        "unpaired",
        POLICY
        | REFERENCE
        | {
            "beta": Change(0.7),
            "desirable_weight": Change(2.0),
            "undesirable_weight": Change(2.0),
            "loss_type": Change("apo_zero_unpaired"),
        },
    ),
    BCOModule: (
        "unpaired",
        dict.fromkeys(POLICY | REFERENCE, AS_KTO)
        | {
            "beta": Change(0.7),
            "desirable_weight": Change(2.0),
            "undesirable_weight": Change(2.0),
            "shift_decay": Change(0.2),
            "match_prompts": Change(True),
            "ref_model": Change("@other"),
            "precompute_ref_log_probs": Change(True),
        },
    ),
    RewardModule: ("pairs", SCALAR | {"center_rewards_coefficient": Change(0.5), "label_smoothing": Change(0.2)}),
    ProcessRewardModule: ("steps", SCALAR | {"words": Change(["1", "2"])}),
    DistillationModule: (
        "texts",
        POLICY
        | {
            "teacher": Change("@model"),
            "divergence": Change("reverse_kl"),
            "temperature": Change(3.0),
            "distillation_coef": Change(0.4),
            "top_k": Change(3),
            "remainder": Change("renormalize", given={"top_k": 3}),
            "precompute_teacher": Change(True, given={"top_k": 3}),
            "chunk_size": Change(1),
        },
    ),
    GRPOModule: ("prompts", POLICY | ON_POLICY | GROUPS),
    OnPolicyDistillationModule: (
        "prompts",
        POLICY
        | ON_POLICY
        | {
            "teacher": Change("@model"),
            "divergence": Change("reverse_kl"),
            "reward_coef": Change(0.5),
        }
        | {name: rewarded(row) for name, row in ON_POLICY.items() if name in OF_REWARDS},
    ),
    PPOModule: ("prompts", POLICY | ON_POLICY | PPO),
    OnlineDPOModule: (
        "prompts",
        dict.fromkeys(POLICY, AS_GRPO)
        | {name: row for name, row in PAIRS.items() if name != "label_smoothing"}
        | {
            "lr": Change(0.01, built=True),
            "loss_type": Change("ipo"),
            "loss_arguments": Change({"divergence": "forward_kl"}),
        },
    ),
}
LEAST_OF: dict[type, dict[str, Any]] = {
    DistillationModule: {"teacher": "@other"},
    OnPolicyDistillationModule: {"teacher": "@other"},
}
ABSTRACT = {"PolicyModule", "PreferenceModule", "ScalarModule", "OnPolicyModule"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("arguments")
    learning.prepare(place)
    return place


def test_every_module_is_in_the_table() -> None:
    kinds = {getattr(rlhfkit.modules, name) for name in rlhfkit.modules.__all__}
    modules = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, rlhfkit.modules.PolicyModule)}
    assert {kind.__name__ for kind in modules - set(TABLE)} <= ABSTRACT


@pytest.mark.parametrize("kind", TABLE)
def test_a_module_can_be_made_again_from_its_hyperparameters(kind: type) -> None:
    """As ``load_from_checkpoint`` does, which hands all of them to a class with ``**kwargs``."""
    module = kind(**{"model": "anywhere"} | LEAST_OF.get(kind, {}))
    assert kind(**module.hparams).hparams == module.hparams
    assert {name.partition(".")[0] for name in arguments_of(kind)} <= module.hparams.keys()  # a run's log is complete


class CuriousDPO(OnlineDPOModule):
    """Has an argument of its own."""

    def __init__(self, *args: Any, entropy_coef: float = 0.1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def test_hyperparameters_of_a_subclass_are_kept_whatever_their_names() -> None:
    assert CuriousDPO("anywhere", entropy_coef=0.5).hparams["entropy_coef"] == 0.5


@pytest.mark.parametrize("kind", TABLE)
def test_a_module_can_be_made_from_a_configuration(kind: type) -> None:
    """A file names what a user chose; jsonargparse gives all other arguments too, those of base classes among them."""
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(L.LightningModule, "model")
    given = {"model": "anywhere"} | LEAST_OF.get(kind, {})
    chosen = parser.parse_object({"model": {"class_path": f"rlhfkit.{kind.__name__}", "init_args": given}})
    assert type(parser.instantiate(chosen).model) is kind


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.long
def test_no_argument_is_accepted_and_ignored(folder: Path, kind: type) -> None:
    data, rows = TABLE[kind]
    observe = functools.partial(learning.learn, folder, data)
    least = LEAST | LEAST_OF.get(kind, {})
    first = seen_twice(kind, least, observe)
    # What a class has from another one of the table, without a word of its own, is looked at there.
    own = [name for name, row in rows.items() if not any(row is TABLE[base][1].get(name) for base in bases(kind))]
    check_none_is_ignored(kind, rows, least, observe, names=own, first=first)


def bases(kind: type) -> list[type]:
    """The classes of the table that a class is derived from."""
    return [base for base in kind.__mro__[1:] if base in TABLE]
