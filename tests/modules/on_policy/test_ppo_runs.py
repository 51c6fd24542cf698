"""PPO with all options: with adapters, with text, and on ranks, whose run is that of one; so is that of distillation.

Covers ppo.py, parts/pretraining_loss.py and datamodules/prompts/pretraining.py.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import fit_run, samples_of_all_ranks, setup_run
from strategies import ranks
from tiny_models import tiny_model

from rlhfkit import (
    LoRA,
    LossOutput,
    OnlineDPOModule,
    OnPolicyDistillationModule,
    Part,
    PPOModule,
    RolloutCallback,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.callbacks import Probe
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.modules.parts import Critic, CriticWarmup, EntropyBonus, RewardModel
from rlhfkit.modules.parts.kl_control import KLTarget, StopEarly
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss
from rlhfkit.modules.parts.rewards import ClipRewards, MissingEndPenalty, NormalizeRewards
from rlhfkit.modules.parts.teacher import Teacher

from .ppo_cases import weight_sum
from .preparation.test_rewards import reward_model
from .test_distillation import of_two_kinds


def everything(*others: Part, **critic: Any) -> list[Part]:
    """A part of each kind."""
    return [
        EntropyBonus(1e-3),
        Critic(**{"lr": 1e-3, "normalize": True} | critic),
        KLTarget(0.01, horizon=100),
        StopEarly(0.055),  # nats: one rank's share of the distance is below, that of both is not
        MissingEndPenalty(0.1),
        NormalizeRewards(),
        ClipRewards(2.0),
        PretrainingLoss(0.2),
        *others,
    ]


def text(micro_batch_size: int) -> SFTDataModule:
    words = [{"text": "ab " * (1 + i % 4) + str(i)} for i in range(23)]
    return SFTDataModule(words, text="text", micro_batch_size=micro_batch_size)


def run(
    folder: Path, *, arguments: dict[str, Any], devices: int = 1, **more: Any
) -> tuple[L.Trainer, Any, RolloutCallback]:
    """Two iterations of four updates on samples and text."""
    return fit_run(
        folder,
        module_arguments={"lr": 0.05, "kl_coef": 0.05} | arguments,
        data_arguments={"micro_batch_size": 8 // devices, "pretraining_data": text(4 // devices)},
        accumulate_grad_batches=1,
        devices=devices,
        **more,
    )


def test_with_adapters_the_reference_is_the_policy_without_them_and_the_critic_has_its_own(tmp_path: Path) -> None:
    arguments = {"lora": LoRA(rank=4), "lr": 3e-2, "parts": everything()}
    _, module, rollouts = run(tmp_path, module=PPOModule, arguments=arguments)
    assert not hasattr(module, "reference")
    assert rollouts.part(Probe).difference <= 1e-5  # the engine samples from the merged policy
    base = load_causal_lm(str(tmp_path / "model"))
    batch = rollouts.experience
    with torch.no_grad():
        expected = policy_output(base, batch, batch.action_mask).logprobs
    torch.testing.assert_close(batch.columns["ref_logprobs"], expected, rtol=0, atol=1e-5)
    assert (batch.columns["ref_logprobs"] - batch.old_logprobs).abs().max() > 1e-2
    for child, others in (("policy", set()), ("critic", {"model.score.weight"})):
        trained = {name for name, p in getattr(module, child).named_parameters() if p.requires_grad}
        assert {name for name in trained if ".lora_" not in name} == others
        moved = [name for name, p in getattr(module, child).named_parameters() if ".lora_B" in name and p.any()]
        assert len(moved) == 14


def test_text_comes_in_whole_steps_and_every_pass_has_another_order(tmp_path: Path) -> None:
    trainer, module, data, _ = setup_run(
        tmp_path, module_arguments={"parts": [PretrainingLoss(0.2)]}, data_arguments={"pretraining_data": text(2)}
    )
    trainer.fit(module, data)
    straight = [data.pretraining_batch(number) for number in range(25)]
    per_pass = 23 // 4 * 2  # five steps of two micro-batches of two, three texts are left over
    for first in (0, per_pass):
        seen = [tuple(row.tolist()) for batch in straight[first : first + per_pass] for row in batch.pad(24).input_ids]
        assert len(seen) == len(set(seen)) == 20
    assert not torch.equal(straight[0].pad(24).input_ids, straight[per_pass].pad(24).input_ids)
    for number in (13, 14):  # by number, in any order
        assert torch.equal(data.pretraining_batch(number).input_ids, straight[number].input_ids)


@pytest.mark.parametrize(
    ("parts", "given", "message"),
    [
        ([PretrainingLoss(0.2).plain()], None, "there is none: give PromptDataModule"),
        ([], text(4), r"nothing learns from: give the module parts=\[PretrainingLoss"),
    ],
)
def test_text_without_its_loss_and_its_loss_without_text_are_errors(
    tmp_path: Path, parts: Any, given: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit_run(tmp_path, module_arguments={"parts": parts}, data_arguments={"pretraining_data": given})


def test_the_loss_of_text_is_refused_where_nothing_is_sampled() -> None:
    with pytest.raises(ValueError, match="is for modules that learn from their own samples, and SFTModule does not"):
        SFTModule("anywhere", parts=[PretrainingLoss(0.1)]).attach_parts()


class OwnLoss(OnlineDPOModule):
    """A loss of a user's own, which calls no other."""

    def loss(self, batch: Any, out: Any) -> LossOutput:
        return LossOutput(0.0 * out.logprobs.sum(), {})


def test_text_is_learned_from_beside_any_loss(tmp_path: Path) -> None:
    arguments = {"module_arguments": {"parts": [PretrainingLoss(0.2)]}, "data_arguments": {"pretraining_data": text(8)}}
    trainer, _, _ = fit_run(tmp_path, module=OwnLoss, **arguments)
    assert trainer.callback_metrics["ptx/loss"] > 0
    torch.testing.assert_close(trainer.callback_metrics["loss"], 0.2 * trainer.callback_metrics["ptx/loss"])


class Momentum:
    """Smooth in the gradient, unlike Adam, with momentum and weight decay that move weights without a gradient."""

    def configure_optimizers(self: Any) -> Any:
        groups = [{"lr": self.lr} | group for group in self.parameter_groups()]
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)


class MomentumPPO(Momentum, PPOModule):
    """PPO so."""


class MomentumDistillation(Momentum, OnPolicyDistillationModule):
    """On-policy distillation so."""


def teachers(folder: str) -> Teacher:
    return Teacher({"even": f"{folder}/teacher", "odd": f"{folder}/base"}, column="kind")


CASES: dict[str, tuple[str, Any, Callable[[str], dict[str, Any]]]] = {
    "PPO, critic of its own": (
        "rlhf_zero3",
        MomentumPPO,
        lambda folder: {"parts": everything(CriticWarmup(1), RewardModel(f"{folder}/reward"), lr=0.02)},
    ),
    "PPO, shared backbone": (
        "rlhf_zero2",
        MomentumPPO,
        lambda folder: {"parts": everything(RewardModel(f"{folder}/reward"), shared=True)},
    ),
    "teachers of two domains": (
        "rlhf_zero3",
        MomentumDistillation,
        lambda folder: {"teacher": None, "parts": [teachers(folder), PretrainingLoss(0.2)]},
    ),
    "divergence from a teacher": (
        "rlhf_zero3",
        MomentumDistillation,
        lambda folder: {"teacher": f"{folder}/teacher", "divergence": "jsd", "parts": [PretrainingLoss(0.2)]},
    ),
}
"""Strategy of several ranks, in which frozen models are sharded too, and arguments from the folder of models."""


class Sums(L.Callback):
    """Sums of all weights after each update, and whether the policy's update was skipped."""

    def __init__(self) -> None:
        self.sums: list[dict[str, float]] = []
        self.still: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        children = {"policy", "critic"} & dict(pl_module.named_children()).keys()
        self.sums.append({child: weight_sum(getattr(pl_module, child)) for child in sorted(children)})
        stopped = any(part.stopped for part in pl_module.parts if isinstance(part, StopEarly))
        warmup = next((part.steps for part in pl_module.parts if isinstance(part, CriticWarmup)), 0)
        self.still.append(stopped or trainer.global_step <= warmup)


def train_on_ranks(folder: Path, world: int) -> dict[str, Any]:
    """Entry point of a rank: run each case, with several ranks under its own strategy."""
    results = {}
    for case, (strategy, module, arguments) in CASES.items():
        sums = Sums()
        trainer, _, rollouts = run(
            folder / case,
            module=module,
            arguments=arguments(str(folder)),
            datamodule=of_two_kinds,
            callbacks=[sums],
            devices=world,
            use_distributed_sampler=False,
            strategy=strategy if world > 1 else "auto",
        )
        skipped = ("time/", "grad_norm/", "skipped_updates")
        metrics = {name: float(one) for name, one in trainer.callback_metrics.items() if not name.startswith(skipped)}
        tokens = [sample.token_ids.tolist() for sample in samples_of_all_ranks(rollouts)]
        norms = sorted(getattr(trainer.strategy, "gradient_norms", {}))
        results[case] = {"sums": sums.sums, "still": sums.still, "tokens": tokens, "metrics": metrics, "norms": norms}
    return results


@pytest.mark.distributed
def test_two_ranks_and_their_engines_score_decide_and_learn_as_one_rank(tmp_path: Path) -> None:
    reward_model(tmp_path)
    tiny_model(tmp_path / "teacher", seed=1)
    for case in CASES:
        tiny_model(tmp_path / case / "model")
    alone = train_on_ranks(tmp_path, 1)
    for result in ranks.run("modules.on_policy.test_ppo_runs:train_on_ranks", 2, tmp_path, world=2):
        for case, got in result.items():
            expected = alone[case]
            assert got["tokens"] == expected["tokens"], case
            assert got["still"] == expected["still"], case
            for mine, one in zip(got["sums"], expected["sums"], strict=True):
                assert mine == pytest.approx(one, rel=1e-5), case
            near = {name: pytest.approx(one, rel=1e-3, abs=1e-5) for name, one in expected["metrics"].items()}
            # Rounding may put a token that lies on a clip's edge on its other side: one of about 250 here.
            if "value/clip_fraction" in near:
                near["value/clip_fraction"] = pytest.approx(expected["metrics"]["value/clip_fraction"], abs=0.02)
            assert got["metrics"] == near, case
            assert got["norms"] == (["critic", "policy"] if "critic" in case else ["policy"])
    for case, ran in (*alone.items(), *result.items()):
        moved = [one["policy"] != other["policy"] for one, other in pairwise(ran["sums"])]
        assert moved == [not still for still in ran["still"][1:]]  # bitwise: neither momentum nor decay
        assert set(moved) == ({True, False} if "PPO" in case else {True})
        assert all(one["critic"] != other["critic"] for one, other in pairwise(ran["sums"]) if "critic" in one)
