"""Filters, KL options and the approximated proximal policy, against the loss functions called by hand.

Covers modules/parts/token_filters.py and correction.py.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import PlainGRPO, ahead, digits, setup_run, weights
from torch import Tensor

from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule, RolloutCallback, SamplingSpec
from rlhfkit.losses import (
    LossOutput,
    group_advantages,
    grpo_loss,
    importance_weights,
    kl_loss,
    off_policy_sequence_mask,
    ppo_loss,
    rejection_mask,
    sum_losses,
    top_entropy_mask,
)
from rlhfkit.losses.policy.base import policy_tokens
from rlhfkit.models import PolicyOutput, policy_output
from rlhfkit.modules.parts import Correction, MaskTruncated
from rlhfkit.modules.parts.kl_control import StopEarly
from rlhfkit.modules.parts.kl_penalty import KLInReward, KLPenalty
from rlhfkit.modules.parts.old_policy import LogLinear
from rlhfkit.modules.parts.token_filters import OffPolicyMask, Rejection, TopEntropy, nth_largest_of_all

REJECTION = {"level": "token", "divergence": "k2", "high": 0.02}


def prepared() -> tuple[Any, Tensor, Tensor]:
    """A batch of a later update with advantages, log-probs of the policy now, and its entropy."""
    batch, generator = experience(), torch.Generator().manual_seed(3)
    advantages = group_advantages(batch.rewards, batch.group)
    batch = dataclasses.replace(batch, advantages=advantages[:, None].expand_as(batch.action_mask))
    assert batch.old_logprobs is not None
    return (
        batch,
        batch.old_logprobs + 0.3 * torch.randn(6, 6, generator=generator),
        torch.rand(6, 6, generator=generator),
    )


@pytest.mark.parametrize(
    ("given", "correction"),
    [
        ({"top_entropy": 0.3}, None),
        ({"off_policy": 0.05}, None),
        ({"rejection": REJECTION}, None),
        ({"top_entropy": 0.5, "off_policy": 0.05, "rejection": REJECTION}, "tis"),
    ],
)
def test_a_token_that_fails_a_test_has_weight_0_and_counts(given: dict[str, Any], correction: str | None) -> None:
    batch, logprobs, entropy = prepared()
    mask, old, engine = batch.action_mask, batch.old_logprobs, batch.rollout_logprobs
    batch.columns["high_entropy"] = top_entropy_mask(entropy, mask, fraction=given.get("top_entropy", 1.0))
    kept = {
        "top_entropy": lambda share: batch.columns["high_entropy"],
        "off_policy": lambda most: off_policy_sequence_mask(batch.advantages, logprobs, engine, mask, threshold=most),
        "rejection": lambda arguments: rejection_mask(old, engine, mask, **arguments),
    }
    weights = torch.ones(6, 6)
    for name, value in given.items():
        weights = weights * kept[name](value)
    assert 0 < weights[mask].sum() < mask.sum()
    if correction is not None:
        weights = weights * importance_weights(old, engine, mask).weights
    made = {
        "top_entropy": TopEntropy,
        "off_policy": OffPolicyMask,
        "rejection": lambda arguments: Rejection(**arguments),
    }
    parts = [made[name](value) for name, value in given.items()]
    corrections = [Correction(correction)] if correction else []
    module = GRPOModule("anywhere", policy_loss="ppo_loss", parts=[*corrections, *parts])
    found = module.loss(batch.with_columns(ref_logprobs=None), PolicyOutput(logprobs, None))
    expected = ppo_loss(logprobs, old, batch.advantages, mask, weights=weights, denominator=20.0)
    torch.testing.assert_close(found.loss, expected.loss)
    for number, (name, value) in enumerate(given.items()):
        metric = "policy/kept_fraction" + (f"/{type(parts[number]).__name__}" if number else "")
        torch.testing.assert_close(found.metrics[metric], kept[name](value)[mask].float().mean())
    assert module.uses_rollout_logprobs == (given.keys() != {"top_entropy"})


class Watch(L.Callback):
    """The entropies of the policy before an iteration, and the chosen tokens."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], tuple[list[float], list[bool]]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.policy = copy.deepcopy(pl_module.policy).eval()
        with torch.no_grad():
            out = policy_output(self.policy, batch, batch.action_mask, entropy=True)
        for row in range(len(batch)):
            trained, key = batch.action_mask[row], (int(batch.group[row]), int(batch.sample_index[row]))
            self.rows[key] = out.entropy[row, trained].tolist(), batch.columns["high_entropy"][row, trained].tolist()


def test_the_choice_is_of_the_whole_iteration_whatever_its_updates_and_micro_batches(tmp_path: Path) -> None:
    """Truncated answers, which are not trained on, are not among the tokens that are compared."""
    chosen, tensors = [], []
    for size, updates in ((8, 2), (4, 4), (16, 1)):
        watch = Watch()
        arguments = {"lr": 0.05, "parts": [MaskTruncated().plain(), TopEntropy(0.3)]}
        trainer, module, data, _ = setup_run(
            tmp_path, module=PlainGRPO, module_arguments=arguments, callbacks=[watch], max_epochs=1,
            data_arguments={"micro_batch_size": size}, accumulate_grad_batches=updates,
        )  # fmt: skip
        trainer.fit(module, data)
        entropies = torch.tensor([one for values, _ in watch.rows.values() for one in values])
        kept = torch.tensor([one for _, choice in watch.rows.values() for one in choice])
        place = int(0.3 * (len(kept) - 1) + 1e-4)
        assert torch.equal(kept, entropies >= entropies.sort(descending=True).values[place] - 1e-5)
        assert 0.3 <= kept.float().mean() < 0.4  # first tokens of a prompt's samples have one entropy
        chosen.append({key: choice for key, (_, choice) in sorted(watch.rows.items())})
        tensors.append(weights(module))
    assert chosen[0] == chosen[1] == chosen[2]
    for tensor in tensors[1:]:
        for name, value in tensor.items():
            torch.testing.assert_close(value, tensors[0][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_the_nth_largest_of_all_is_that_of_a_sorted_list(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-8, 8, (count,), generator=generator)
    values[: count // 3] = values[-1]  # ties
    values[count // 2] = 0.0
    order = values.sort(descending=True).values.tolist()
    assert [nth_largest_of_all(values, place) for place in range(0, count, 1 + count // 50)] == order[
        :: 1 + count // 50
    ]
    assert nth_largest_of_all(values, count) == -torch.inf
    assert nth_largest_of_all(values[:0], 0) == -torch.inf


@pytest.mark.parametrize("policy_loss", ["ppo_loss", "grpo_loss"])
def test_the_kl_of_the_loss_is_clamped_and_weighted_with_any_policy_loss(policy_loss: str) -> None:
    batch, logprobs, _ = prepared()
    logprobs.requires_grad_()
    penalty = KLPenalty(0.3, clamp=0.01, importance_weight=True)
    module = GRPOModule("anywhere", policy_loss=policy_loss, aggregation="token-mean", parts=[penalty])
    made = module.loss(batch, PolicyOutput(logprobs, None)).loss
    inputs = logprobs, batch.old_logprobs, batch.advantages, batch.action_mask
    reduction: dict[str, Any] = {"aggregation": "token-mean", "denominator": 20.0}
    reference, ratio = batch.columns["ref_logprobs"], policy_tokens(*inputs).ratio  # type: ignore[arg-type]
    kl = kl_loss(logprobs, reference, batch.action_mask, coef=0.3, clamp=0.01, importance_weight=ratio, **reduction)
    expected = sum_losses(grpo_loss(*inputs, **reduction), kl).loss
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(torch.autograd.grad(made, logprobs), torch.autograd.grad(expected, logprobs))


class Proximal(PlainGRPO):
    """Compares the log-probs that the ratio is to with the line through two policy versions."""

    checked: Any = ()

    def setup(self, stage: str) -> None:
        super().setup(stage)

        def refuse(*arguments: Any, **more: Any) -> Tensor:
            raise AssertionError("log-linear proximal log-probs need no forward pass")

        self.passes.statistics = refuse  # type: ignore[method-assign]

    def loss(self, batch: Any, out: Any) -> Any:
        if self._trainer is not None and torch.is_grad_enabled():
            updates = self.trainer.global_step
            begun = updates // 2 * 2  # two updates an iteration
            old, now, engine = self.old_logprobs(batch, out), out.logprobs.detach(), batch.rollout_logprobs
            for row, step in batch.action_mask.nonzero().tolist():
                version = int(batch.versions[row, step])
                share = 1.0 if updates == begun else (begun - version) / (updates - version)
                expected = (1 - share) * engine[row, step] + share * now[row, step]
                torch.testing.assert_close(old[row, step], expected, rtol=0, atol=1e-6)
                self.checked = {*self.checked, (updates - begun, begun - version)}
        return super().loss(batch, out)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_log_linear_log_probs_lie_between_engine_and_policy(tmp_path: Path, max_staleness: int) -> None:
    sampling = SamplingSpec(group_size=4, max_new_tokens=8)
    trainer, module, data, _ = setup_run(
        tmp_path,
        module=Proximal,
        module_arguments={"parts": [LogLinear()], "lr": 0.05},
        rollouts=RolloutCallback(digits, sampling=sampling, parts=ahead(max_staleness)),
        max_epochs=3,
    )
    trainer.fit(module, data)
    assert module.checked >= ({(0, 0), (1, 0)} if not max_staleness else {(0, 2), (1, 2)})  # type: ignore[attr-defined]


def filtering(name: str, **arguments: Any) -> dict[str, Any]:
    """A filter as in YAML."""
    return {"class_path": f"rlhfkit.modules.parts.token_filters.{name}", "init_args": arguments}


def penalizing_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, ref_logprobs: Any, kl_coef: float
) -> LossOutput:
    """A user's loss with a KL penalty of its own."""
    penalty = kl_loss(logprobs, ref_logprobs, mask, coef=kl_coef)
    return sum_losses(grpo_loss(logprobs, old_logprobs, advantages, mask), penalty)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": [filtering("TopEntropy", fraction=1.5)]}, "TopEntropy.fraction"),
        ({"parts": [filtering("OffPolicyMask", threshold=-1.0)]}, "OffPolicyMask.threshold"),
        ({"policy_loss_arguments": {"kl_clamp": 10.0}}, "dapo_loss does not take kl_clamp"),
        ({"policy_loss": penalizing_loss}, "does not take what it is given.*ref_logprobs"),
        (
            {
                "policy_loss": "vespo_loss",
                "parts": [Correction("seq-tis").plain(), filtering("TopEntropy", fraction=0.2)],
            },
            "vespo_loss multiplies the weights",
        ),
        ({"parts": [LogLinear(), KLInReward(0.1)]}, "LogLinear makes no forward pass"),
        ({"parts": [LogLinear(), StopEarly(0.1)]}, "LogLinear makes no forward pass"),
    ],
)
def test_a_bad_argument_is_an_error_when_the_module_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOModule("anywhere", **arguments)
