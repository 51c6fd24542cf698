"""Every policy loss of rlhfkit.losses as ``policy_loss`` of a module, against the function called by hand.

Functions as ``advantages`` are in test_base.py.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhfkit.losses
from rlhfkit import GRPOModule, PPOModule
from rlhfkit.data import Experience
from rlhfkit.losses import (
    LossOutput,
    cispo_loss,
    dppo_loss,
    gspo_loss,
    importance_weights,
    ppo_loss,
    vespo_loss,
)
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.on_policy.base import OnPolicyModule
from rlhfkit.modules.parts import Correction

from .test_base import experience

EVERY: dict[str, Callable[..., LossOutput]] = {
    name: getattr(rlhfkit.losses, name)
    for name in rlhfkit.losses.__all__
    if name.endswith("_loss") and "old_logprobs" in inspect.signature(getattr(rlhfkit.losses, name)).parameters
}
TOKENS, SEQUENCES, ROWS = 20.0, 4.5, 5.0  # of the optimizer step that the batch is half of
COUNTED = {"token-mean": TOKENS, "constant-length": ROWS}


def prepared(seed: int = 0) -> tuple[Experience, Tensor]:
    """A batch with advantages of both signs, and log-probs of a policy that has moved."""
    batch, generator = experience(seed), torch.Generator().manual_seed(seed + 1)
    assert batch.old_logprobs is not None
    batch.advantages = torch.randn(6, 6, generator=generator)
    logprobs = batch.old_logprobs.double() + 0.3 * torch.randn(6, 6, generator=generator)
    return batch, logprobs.requires_grad_()


def value_and_gradient(loss: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def through(module: OnPolicyModule, batch: Experience, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    return value_and_gradient(module.loss(batch, PolicyOutput(logprobs, None)).loss, logprobs)


@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"decoupled_ppo_loss", "dppo_loss"}))
def test_every_loss_is_called_as_by_hand_with_its_own_defaults_and_weighed_by_a_correction(name: str) -> None:
    """Those two, which are given the engine's log-probs, are presets: ``test_base.py``."""
    loss, (batch, logprobs) = EVERY[name], prepared()
    assert batch.advantages is not None
    assert batch.old_logprobs is not None
    batch.columns.pop("ref_logprobs", None)
    knobs: dict[str, Any] = {"max_length": 6} if name == "dr_grpo_loss" else {}
    correction = {"level": "sequence", "mode": "truncate", "high": 1.1}
    module = GRPOModule(
        "anywhere", policy_loss=name, kl_coef=0.0, policy_loss_arguments=knobs, parts=[Correction(correction)]
    )
    torch.manual_seed(0)  # Clip-Cov draws
    got = through(module, batch, logprobs)
    mask = batch.action_mask
    log_ratio = torch.where(mask, batch.old_logprobs - batch.rollout_logprobs, 0.0).sum(-1)
    if "denominator" in inspect.signature(loss).parameters:
        knobs["denominator"] = COUNTED.get(inspect.signature(loss).parameters["aggregation"].default, SEQUENCES)
    torch.manual_seed(0)
    by_hand = loss(
        logprobs, batch.old_logprobs, batch.advantages, mask, weights=log_ratio.exp().clamp(max=1.1), **knobs
    )
    for mine, theirs in zip(got, value_and_gradient(by_hand.loss, logprobs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_gspo_keeps_its_own_clip_and_a_given_one_holds() -> None:
    batch, logprobs = prepared()
    batch.columns.pop("ref_logprobs", None)
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    inputs = logprobs, batch.old_logprobs, batch.advantages, batch.action_mask
    clipped = {}
    for arguments in ({}, {"clip_low": 0.2, "clip_high": 0.28}):
        module = GRPOModule("anywhere", policy_loss="gspo_loss", **arguments)
        out = module.loss(batch, PolicyOutput(logprobs, None))
        expected = gspo_loss(*inputs, denominator=SEQUENCES, **arguments)
        assert torch.equal(out.loss, expected.loss)
        clipped[len(arguments)] = float(out.metrics["policy/clip_fraction"])
    assert clipped[0] > clipped[2]  # 3e-4 and 4e-4 of the paper are narrow


def test_the_default_loss_of_grpo_is_dapos_and_that_of_ppo_is_ppos() -> None:
    batch, logprobs = prepared()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    batch.columns.pop("ref_logprobs", None)
    inputs = logprobs, batch.old_logprobs, batch.advantages, batch.action_mask
    for kind, clip_high in ((GRPOModule, 0.28), (PPOModule, 0.2), (OnPolicyModule, 0.2)):
        arguments = {} if kind is OnPolicyModule else {"kl_coef": 0.0}
        made = kind("anywhere", **arguments).loss(batch, PolicyOutput(logprobs, None)).loss
        assert torch.equal(made, ppo_loss(*inputs, clip_low=0.2, clip_high=clip_high, denominator=TOKENS).loss)


def test_dppo_sees_the_engines_log_probs_in_the_first_update_too() -> None:
    batch, _ = prepared()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    batch.columns, current = {}, batch.old_logprobs
    batch.old_logprobs = None  # the policy's own are the old ones
    batch.rollout_logprobs = torch.where(batch.action_mask, current + 0.8 * batch.advantages.sign(), 0.0)
    batch.advantages = -batch.advantages  # each token has gone from the engine the way it is pushed
    module = GRPOModule(
        "anywhere", policy_loss="dppo_loss", policy_loss_arguments={"mask_low": 0.05, "mask_high": 0.05}
    )
    metrics = module.loss(batch, PolicyOutput(current, None)).metrics
    assert float(metrics["policy/clip_fraction"]) > 0.5  # 0 where the trainer's own were given
    assert float(metrics["policy/approx_kl"]) == 0.0
    unknown = torch.full_like(current, torch.nan)
    same = dppo_loss(current, current, batch.advantages, batch.action_mask, rollout_logprobs=unknown)
    assert float(same.metrics["policy/clip_fraction"]) == 0.0


def test_weights_of_tokens_and_of_sequences_enter_the_kernel_of_vespo_as_what_they_are() -> None:
    batch, logprobs = prepared()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    batch.columns, mask = {}, batch.action_mask
    for level in ("token", "geometric"):
        correction = {"level": level, "mode": "none", "high": None}
        module = GRPOModule("anywhere", policy_loss="vespo_loss", parts=[Correction(correction)])
        weights = importance_weights(batch.old_logprobs, batch.rollout_logprobs, mask, **correction).weights
        if level == "geometric":
            weights = torch.stack([row[kept][0] for row, kept in zip(weights, mask, strict=True)])
        inputs = logprobs, batch.old_logprobs, batch.advantages, mask
        expected = vespo_loss(*inputs, weights=weights, denominator=TOKENS).loss
        torch.testing.assert_close(module.loss(batch, PolicyOutput(logprobs, None)).loss, expected)


def plain(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, scale: float = 1.0
) -> LossOutput:
    """A user's loss without weights, denominator or clip."""
    return LossOutput(-scale * (logprobs * advantages * mask).sum(), {})


def in_another_order(
    mask: Tensor, old_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, *, denominator: float | None = None
) -> LossOutput:
    return ppo_loss(logprobs, old_logprobs, advantages, mask, denominator=denominator)


def wrapped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, **knobs: Any) -> LossOutput:
    return ppo_loss(logprobs, old_logprobs, advantages, mask, **knobs)


def test_a_loss_with_arguments_is_remembered() -> None:
    one = torch.ones(1, 1)
    for given in (
        partial(cispo_loss, ratio_max=1.5),
        {"class_path": "cispo_loss", "init_args": {"ratio_max": 1.5}},
    ):
        made = GRPOModule("anywhere", policy_loss=given)
        assert made.hparams["policy_loss"]["init_args"] == {"ratio_max": 1.5}
        for module in (made, GRPOModule(**made.hparams)):
            found = module.policy_loss.function(one, 0 * one, one, one).loss
            assert found == cispo_loss(one, 0 * one, one, one, ratio_max=1.5).loss
            assert found != cispo_loss(one, 0 * one, one, one).loss


def test_a_loss_of_ones_own_is_given_what_it_names() -> None:
    batch, logprobs = prepared()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    batch.columns.pop("ref_logprobs", None)
    module = GRPOModule("anywhere", policy_loss=plain, policy_loss_arguments={"scale": 2.0})
    expected = -2.0 * (logprobs * batch.advantages * batch.action_mask).sum()
    torch.testing.assert_close(module.loss(batch, PolicyOutput(logprobs, None)).loss, expected)
    assert GRPOModule(**module.hparams).policy_loss.function is plain
    with_knobs = GRPOModule("anywhere", policy_loss=wrapped, clip_high=0.3)
    inputs = logprobs, batch.old_logprobs, batch.advantages, batch.action_mask
    made = with_knobs.loss(batch, PolicyOutput(logprobs, None)).loss
    assert torch.equal(made, ppo_loss(*inputs, clip_high=0.3, denominator=TOKENS).loss)
    mixed = GRPOModule("anywhere", policy_loss=in_another_order).loss(batch, PolicyOutput(logprobs, None)).loss
    assert torch.equal(mixed, ppo_loss(*inputs, denominator=TOKENS).loss)


def test_an_argument_that_is_named_like_one_of_the_module_belongs_to_the_loss_where_it_is_its_own() -> None:
    batch, logprobs = prepared()
    assert batch.old_logprobs is not None
    assert batch.advantages is not None
    batch.columns.pop("ref_logprobs", None)
    module = GRPOModule("anywhere", policy_loss="kl_cov_loss", policy_loss_arguments={"kl_coef": 7.0, "fraction": 0.3})
    inputs = logprobs, batch.old_logprobs, batch.advantages, batch.action_mask
    expected = rlhfkit.losses.kl_cov_loss(*inputs, kl_coef=7.0, fraction=0.3, denominator=TOKENS).loss
    assert torch.equal(module.loss(batch, PolicyOutput(logprobs, None)).loss, expected)
