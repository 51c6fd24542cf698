"""Filters, KL options and the approximated proximal policy, against the loss functions called by hand.

Covers token_filter.py and engine_mismatch.py.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import PlainGRPO, digits, setup_run
from torch import Tensor

from modules.on_policy.test_base import experience
from rlhfkit import GRPOModule, KLControl, RolloutCallback, SamplingSpec, TokenFilter
from rlhfkit.losses import (
    group_advantages,
    grpo_loss,
    importance_weights,
    off_policy_sequence_mask,
    ppo_loss,
    rejection_mask,
    top_entropy_mask,
)
from rlhfkit.models import PolicyOutput

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
    kept = {
        "top_entropy": lambda share: top_entropy_mask(entropy, mask, fraction=share),
        "off_policy": lambda most: off_policy_sequence_mask(batch.advantages, logprobs, engine, mask, threshold=most),
        "rejection": lambda arguments: rejection_mask(old, engine, mask, **arguments),
    }
    weights = torch.ones(6, 6)
    for name, value in given.items():
        weights = weights * kept[name](value)
    assert 0 < weights[mask].sum() < mask.sum()
    fraction = weights[mask].mean()
    if correction is not None:
        weights = weights * importance_weights(old, engine, mask).weights
    module = GRPOModule("anywhere", policy_loss="ppo_loss", token_filter=TokenFilter(**given), correction=correction)
    made = module.loss(dataclasses.replace(batch, ref_logprobs=None), PolicyOutput(logprobs, entropy))
    expected = ppo_loss(logprobs, old, batch.advantages, mask, weights=weights, denominator=20.0)
    torch.testing.assert_close(made.loss, expected.loss)
    torch.testing.assert_close(made.metrics["policy/kept_fraction"], fraction)
    assert module.uses_rollout_logprobs == (given.keys() != {"top_entropy"})
    assert module.loss_gradient_scope(batch) == (None if "top_entropy" in given else "batch")


@pytest.mark.parametrize("policy_loss", ["ppo_loss", "grpo_loss"])
def test_the_kl_of_the_loss_is_clamped_and_weighted_with_any_policy_loss(policy_loss: str) -> None:
    batch, logprobs, _ = prepared()
    logprobs.requires_grad_()
    arguments: dict[str, Any] = {"kl_coef": 0.3, "kl_clamp": 0.01, "kl_importance_weight": True}
    module = GRPOModule("anywhere", policy_loss=policy_loss, aggregation="token-mean", **arguments)
    made = module.loss(batch, PolicyOutput(logprobs, None)).loss
    expected = grpo_loss(
        logprobs, batch.old_logprobs, batch.advantages, batch.action_mask, ref_logprobs=batch.ref_logprobs,
        aggregation="token-mean", denominator=20.0, **arguments,
    ).loss  # fmt: skip
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(torch.autograd.grad(made, logprobs), torch.autograd.grad(expected, logprobs))


class Proximal(PlainGRPO):
    """Compares the log-probs that the ratio is to with the line through two policy versions."""

    checked: Any = ()

    def distributed_logprobs(self, *arguments: Any, **more: Any) -> Tensor:
        raise AssertionError("log-linear proximal log-probs need no forward pass")

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
        module_arguments={"proximal": "log-linear", "lr": 0.05},
        rollouts=RolloutCallback(digits, sampling=sampling, max_staleness=max_staleness),
        max_epochs=3,
    )
    trainer.fit(module, data)
    assert module.checked >= ({(0, 0), (1, 0)} if not max_staleness else {(0, 2), (1, 2)})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"token_filter": {"top_entropy": 1.5}}, "TokenFilter.top_entropy"),
        ({"token_filter": {"rejection": {"level": "token"}}}, "arguments of rejection_mask"),
        ({"token_filter": {"rejection": {"level": "word", "high": 1.0}}}, "level must be one of"),
        ({"kl_clamp": 10.0}, "kl_clamp would have no effect"),
        ({"kl_importance_weight": True, "kl_coef": 0.1, "kl_in_reward": True}, "would have no effect"),
        ({"proximal": "older"}, "proximal must be recompute or log-linear"),
        ({"proximal": "log-linear", "kl_coef": 0.1, "kl_in_reward": True}, "use proximal='recompute'"),
        ({"proximal": "log-linear", "kl_control": KLControl(early_stop=0.1)}, "use proximal='recompute'"),
        ({"entropy_control": {"target": 0.0}}, "EntropyControl.target"),
        ({"entropy_control": {"target": 0.1, "step": 0.0}}, "EntropyControl.step"),
    ],
)
def test_a_bad_argument_is_an_error_when_the_module_is_made(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOModule("anywhere", **arguments)
