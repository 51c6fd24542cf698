"""PPO with all options: split over micro-batches or ranks, stopped and resumed, it is the same run.

Covers ppo.py, parts/pretraining_loss.py and datamodules/prompts/pretraining.py.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import fit_run, samples_of_all_ranks, setup_run
from strategies import ranks
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import (
    LoRA,
    LossOutput,
    OnlineDPOModule,
    PPOModule,
    SFTDataModule,
    SFTModule,
)
from rlhfkit.callbacks import Probe
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.modules.parts import Critic, CriticWarmup, EntropyBonus, RewardModel
from rlhfkit.modules.parts.kl_control import KLTarget, StopEarly
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss
from rlhfkit.modules.parts.rewards import ClipRewards, MissingEndPenalty, NormalizeRewards

from .ppo_cases import PlainPPO
from .preparation.test_rewards import reward_model


def control(limit: float | None = None) -> list[dict[str, Any]]:
    """A target of the KL and, with a limit, early stopping, as plain values: each module makes its own parts."""
    target = KLTarget(0.01, horizon=100)
    return [target.plain()] if limit is None else [target.plain(), StopEarly(limit).plain()]


def has_stopped(module: PPOModule) -> bool:
    """Whether early stopping is in effect."""
    return any(part.stopped for part in module.parts if isinstance(part, StopEarly))


SHAPING = [one.plain() for one in (MissingEndPenalty(0.1), NormalizeRewards(), ClipRewards(2.0))]
TEXT = PretrainingLoss(0.2).plain()
STOPS_EARLY = [*control(1e-3), *SHAPING, TEXT]


def parts(*others: Any, **critic: Any) -> list[Any]:
    """A bonus for entropy, a critic, and others."""
    return [EntropyBonus(1e-3).plain(), Critic(**{"lr": 1e-3, "normalize": True} | critic).plain(), *others]


EVERYTHING: dict[str, Any] = {"parts": parts(*control(5e-3), *SHAPING, TEXT), "kl_coef": 0.05}


def text(micro_batch_size: int = 2, rows: int = 21) -> SFTDataModule:
    words = [{"text": "ab " * (1 + i % 4) + str(i)} for i in range(rows)]
    return SFTDataModule(words, text="text", micro_batch_size=micro_batch_size)


def run(folder: Path, arguments: dict[str, Any], *, callbacks: Any = (), module: Any = PPOModule, **more: Any) -> Any:
    """Four updates an iteration, three iterations."""
    size = more.pop("micro_batch_size", 4)
    each = size // 2 // more.get("devices", 1)
    return setup_run(
        folder,
        module=module,
        module_arguments={"lr": 2e-3} | EVERYTHING | arguments,
        data_arguments={"micro_batch_size": 2 * each, "pretraining_data": text(each)},
        callbacks=callbacks,
        **{"max_epochs": 3, "accumulate_grad_batches": 8 // size} | more,
    )


def weights(module: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


class SaveAt(L.Callback):
    """Saves a checkpoint after a batch."""

    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch, self.count = path, batch, 0
        self.stopped = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        if self.count == self.batch:
            self.stopped = has_stopped(pl_module)
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"parts": parts(*control(5e-3), *SHAPING, TEXT, shared=True)}, marks=pytest.mark.long),
        pytest.param({"lora": LoRA(rank=4), "lr": 3e-2}, marks=pytest.mark.long),
    ],
    ids=["two models", "shared backbone", "lora"],
)
def test_a_run_that_is_resumed_inside_an_iteration_is_bitwise_the_straight_one(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    save = SaveAt(tmp_path / "saved.ckpt", batch=14)  # of 8 an iteration: three updates into the second
    trainer, straight, data, _ = run(tmp_path, arguments, callbacks=[save])
    trainer.fit(straight, data)
    assert save.stopped  # early stopping is in effect, and still is when resumed
    trainer, resumed, data, _ = run(tmp_path, arguments)
    trainer.fit(resumed, data, ckpt_path=str(tmp_path / "saved.ckpt"))
    expected = weights(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())
    assert [part.state_dict() for part in resumed.parts] == [part.state_dict() for part in straight.parts]


def test_with_adapters_the_reference_is_the_policy_without_them_and_the_critic_has_its_own(tmp_path: Path) -> None:
    trainer, module, data, rollouts = run(
        tmp_path, {"lora": LoRA(rank=4), "lr": 3e-2, "parts": parts(*control(), *SHAPING, TEXT)}, max_epochs=2
    )
    trainer.fit(module, data)
    assert not hasattr(module, "reference")
    assert rollouts.part(Probe).difference <= 1e-5  # the engine samples from the merged policy
    base = load_causal_lm(str(tmp_path / "model"))
    batch = rollouts.experience
    with torch.no_grad():
        expected = policy_output(base, batch, batch.action_mask).logprobs
    torch.testing.assert_close(batch.columns["ref_logprobs"], expected, rtol=0, atol=1e-5)
    assert (batch.columns["ref_logprobs"] - batch.old_logprobs).abs().max() > 1e-2
    moved = {
        child: {name for name, p in getattr(module, child).named_parameters() if p.requires_grad and p.abs().sum() > 0}
        for child in ("policy", "critic")
    }
    assert all(".lora_" in name for name in moved["policy"])
    assert (
        sum(".lora_B" in name for name in moved["policy"]) == sum(".lora_B" in name for name in moved["critic"]) == 14
    )
    assert {name for name in moved["critic"] if ".lora_" not in name} == {"model.score.weight"}


def test_text_comes_in_whole_steps_and_every_pass_has_another_order(tmp_path: Path) -> None:
    trainer, module, data, _ = run(tmp_path, {}, max_epochs=1)
    trainer.fit(module, data)
    straight = [data.pretraining_batch(number) for number in range(25)]
    per_pass = 21 // 4 * 2  # five steps of two micro-batches of two, one text is left over
    for first in (0, per_pass):
        seen = [tuple(row.tolist()) for batch in straight[first : first + per_pass] for row in batch.pad(24).input_ids]
        assert len(seen) == len(set(seen)) == 20
    assert not torch.equal(straight[0].pad(24).input_ids, straight[per_pass].pad(24).input_ids)
    assert torch.equal(data.pretraining_batch(13).input_ids, straight[13].input_ids)  # by number, in any order
    assert torch.equal(data.pretraining_batch(14).input_ids, straight[14].input_ids)


@pytest.mark.parametrize(
    ("parts", "given", "message"),
    [
        ([TEXT], None, "there is none: give PromptDataModule"),
        ([], text(), r"nothing learns from: give the module parts=\[PretrainingLoss"),
    ],
)
def test_text_without_its_loss_and_its_loss_without_text_are_errors(
    tmp_path: Path, parts: Any, given: Any, message: str
) -> None:
    trainer, module, data, _ = setup_run(
        tmp_path, module=PPOModule, module_arguments={"parts": parts}, data_arguments={"pretraining_data": given}
    )
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, data)


def test_the_loss_of_text_is_refused_where_nothing_is_sampled() -> None:
    with pytest.raises(ValueError, match="is for modules that learn from their own samples, and SFTModule does not"):
        SFTModule("anywhere", parts=[PretrainingLoss(0.1)]).attach_parts()


class OwnLoss(OnlineDPOModule):
    """A loss of a user's own, which calls no other."""

    def loss(self, batch: Any, out: Any) -> LossOutput:
        return LossOutput(0.0 * out.logprobs.sum(), {})


def test_text_is_learned_from_beside_any_loss(tmp_path: Path) -> None:
    for module in (OwnLoss, OnlineDPOModule):
        trainer, _, _ = fit_run(
            tmp_path, module=module, module_arguments={"parts": [TEXT]}, data_arguments={"pretraining_data": text(8)}
        )
        assert trainer.callback_metrics["ptx/loss"] > 0
        if module is OwnLoss:
            torch.testing.assert_close(trainer.callback_metrics["loss"], 0.2 * trainer.callback_metrics["ptx/loss"])


class Momentum(PPOModule):
    """Smooth in the gradient, unlike Adam, with momentum and weight decay that move weights without a gradient."""

    def configure_optimizers(self) -> Any:
        groups = [{"lr": self.lr} | group for group in self.parameter_groups()]
        return torch.optim.SGD(groups, momentum=0.9, weight_decay=0.01)


CASES: dict[str, dict[str, Any]] = {
    "two models": {"strategy": "rlhf_zero3", "module": PlainPPO, "max_epochs": 2},
    "everything": {"strategy": "rlhf_zero2", "module": Momentum},
    "shared backbone": {"strategy": "rlhf_zero3", "module": PlainPPO},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "two models": {"parts": parts(*control(), normalize=False), "lr": 0.05},
    "everything": {"parts": parts(*STOPS_EARLY, CriticWarmup(1).plain(), lr=0.02), "lr": 0.05},
    "shared backbone": {"parts": parts(*STOPS_EARLY, shared=True), "lr": 0.05},
}  # fmt: skip


class Sums(L.Callback):
    """Sums of all weights after each update, and whether the policy's update was skipped."""

    def __init__(self) -> None:
        self.sums: list[dict[str, float]] = []
        self.still: list[bool] = []
        self.tokens: list[list[int]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        from rlhfkit.distributed import full_parameters

        sums = {}
        for child in sorted({"policy", "critic"} & dict(pl_module.named_children()).keys()):
            parameters = list(getattr(pl_module, child).parameters())
            with full_parameters(parameters):
                sums[child] = sum(float(each.detach().double().abs().sum()) for each in parameters)
        self.sums.append(sums)
        warmup = next((part.steps for part in pl_module.parts if isinstance(part, CriticWarmup)), 0)
        self.still.append(has_stopped(pl_module) or trainer.global_step <= warmup)
        self.tokens = [sample.token_ids.tolist() for sample in samples_of_all_ranks(trainer.callbacks[0])]


def train_on_ranks(folder: Path, strategy: str | None, world: int) -> dict[str, Any]:
    """Entry point of a rank: run each case, under its own strategy unless one is given."""
    results = {}
    for case, settings in CASES.items():
        sums = Sums()
        more = [RewardModel(str(folder / "reward")).plain()] if case != "two models" else []
        trainer, module, data, _ = run(
            folder / case,
            ARGUMENTS[case] | {"parts": [*ARGUMENTS[case]["parts"], *more]},
            callbacks=[sums],
            micro_batch_size=8,
            devices=world,
            use_distributed_sampler=False,
            **{"max_epochs": 2} | settings | ({"strategy": strategy} if strategy else {}),
        )
        if case == "two models":
            data.pretraining_data = None
        trainer.fit(module, data)
        metrics = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.startswith(("time/", "grad_norm/", "skipped_updates"))
        }
        results[case] = {
            "sums": sums.sums, "still": sums.still, "tokens": sums.tokens, "metrics": metrics,
            "norms": sorted(getattr(trainer.strategy, "gradient_norms", {})),
        }  # fmt: skip
    return results


@pytest.mark.distributed
def test_two_ranks_and_their_engines_score_decide_and_learn_as_one_rank(tmp_path: Path) -> None:
    reward_model(tmp_path)
    for case in CASES:
        tiny_model(tmp_path / case / "model")
    alone = train_on_ranks(tmp_path, "auto", 1)
    for result in ranks.run("modules.on_policy.test_ppo_runs:train_on_ranks", 2, tmp_path, strategy=None, world=2):
        for case, got in result.items():
            expected = alone[case]
            assert got["tokens"] == expected["tokens"], case
            assert got["still"] == expected["still"], case
            for mine, one in zip(got["sums"], expected["sums"], strict=True):
                assert mine == pytest.approx(one, rel=1e-5), case
            # Rounding may put a token that lies on a clip's edge on its other side: one of about 250 here.
            edge = [metrics.pop("value/clip_fraction") for metrics in (got["metrics"], dict(expected["metrics"]))]
            assert edge[0] == pytest.approx(edge[1], abs=0.02), case
            others = {name: value for name, value in expected["metrics"].items() if name != "value/clip_fraction"}
            assert got["metrics"] == pytest.approx(others, rel=1e-3, abs=1e-5), case
            assert got["norms"] == (["policy"] if case == "shared backbone" else ["critic", "policy"])
    for ran in (alone["everything"], result["everything"]):
        moved = [one["policy"] != other["policy"] for one, other in pairwise(ran["sums"])]
        assert moved == [not still for still in ran["still"][1:]]  # bitwise: neither momentum nor decay
        assert len(set(moved)) == 2
        assert all(one["critic"] != other["critic"] for one, other in pairwise(ran["sums"]))
