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
    kl_cov_loss,
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


def prepared() -> tuple[Experience, tuple[Tensor, ...]]:
    """A batch with advantages of both signs; log-probs of a policy that has moved, old ones, advantages and mask."""
    batch, generator = experience(), torch.Generator().manual_seed(1)
    batch.columns.pop("ref_logprobs")
    batch.advantages = torch.randn(6, 6, generator=generator)
    logprobs = batch.old_logprobs.double() + 0.3 * torch.randn(6, 6, generator=generator)
    return batch, (logprobs.requires_grad_(), batch.old_logprobs, batch.advantages, batch.action_mask)


def loss_of(module: OnPolicyModule, batch: Experience, logprobs: Tensor) -> LossOutput:
    return module.loss(batch, PolicyOutput(logprobs, None))


@pytest.mark.parametrize("name", sorted(EVERY.keys() - {"decoupled_ppo_loss", "dppo_loss"}))
def test_every_loss_is_called_as_by_hand_with_its_own_defaults_and_weighed_by_a_correction(name: str) -> None:
    """Those two, which are given the engine's log-probs, are presets: ``test_base.py``."""
    loss, (batch, inputs) = EVERY[name], prepared()
    logprobs, old, _, mask = inputs
    knobs: dict[str, Any] = {"max_length": 6} if name == "dr_grpo_loss" else {}
    correction = {"level": "sequence", "mode": "truncate", "high": 1.1}
    module = GRPOModule(
        "anywhere", policy_loss=name, kl_coef=0.0, policy_loss_arguments=knobs, parts=[Correction(correction)]
    )
    torch.manual_seed(0)  # Clip-Cov draws
    got = loss_of(module, batch, logprobs).loss
    log_ratio = torch.where(mask, old - batch.rollout_logprobs, 0.0).sum(-1)
    if "denominator" in inspect.signature(loss).parameters:
        knobs["denominator"] = COUNTED.get(inspect.signature(loss).parameters["aggregation"].default, SEQUENCES)
    torch.manual_seed(0)
    by_hand = loss(*inputs, weights=log_ratio.exp().clamp(max=1.1), **knobs).loss
    for mine, theirs in ((got, by_hand), [torch.autograd.grad(one, logprobs)[0] for one in (got, by_hand)]):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def test_dppo_sees_the_engines_log_probs_in_the_first_update_too() -> None:
    batch, _ = prepared()
    current = batch.old_logprobs
    batch.old_logprobs = None  # the policy's own are the old ones
    batch.rollout_logprobs = torch.where(batch.action_mask, current + 0.8 * batch.advantages.sign(), 0.0)
    batch.advantages = -batch.advantages  # each token has gone from the engine the way it is pushed
    module = GRPOModule(
        "anywhere", policy_loss="dppo_loss", policy_loss_arguments={"mask_low": 0.05, "mask_high": 0.05}
    )
    metrics = loss_of(module, batch, current).metrics
    assert float(metrics["policy/clip_fraction"]) > 0.5  # 0 where the trainer's own were given
    assert float(metrics["policy/approx_kl"]) == 0.0
    unknown = torch.full_like(current, torch.nan)
    same = dppo_loss(current, current, batch.advantages, batch.action_mask, rollout_logprobs=unknown)
    assert float(same.metrics["policy/clip_fraction"]) == 0.0


def test_weights_of_tokens_and_of_sequences_enter_the_kernel_of_vespo_as_what_they_are() -> None:
    batch, inputs = prepared()
    mask = batch.action_mask
    for level in ("token", "geometric"):
        correction = {"level": level, "mode": "none", "high": None}
        module = GRPOModule("anywhere", policy_loss="vespo_loss", parts=[Correction(correction)])
        weights = importance_weights(batch.old_logprobs, batch.rollout_logprobs, mask, **correction).weights
        if level == "geometric":
            weights = torch.stack([row[kept][0] for row, kept in zip(weights, mask, strict=True)])
        expected = vespo_loss(*inputs, weights=weights, denominator=TOKENS).loss
        torch.testing.assert_close(loss_of(module, batch, inputs[0]).loss, expected)


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


KL_COV = {"kl_coef": 7.0, "fraction": 0.3}
NARROW = {"clip_low": 0.2, "clip_high": 0.28}
LARGER = partial(cispo_loss, ratio_max=1.5)
CALLED: dict[str, tuple[Any, dict[str, Any], Callable[..., LossOutput]]] = {
    "the default of GRPO is DAPO's": (GRPOModule, {}, partial(ppo_loss, **NARROW)),
    "the default of PPO": (PPOModule, {"kl_coef": 0.0}, partial(ppo_loss, clip_low=0.2, clip_high=0.2)),
    "the default of others": (OnPolicyModule, {}, partial(ppo_loss, clip_low=0.2, clip_high=0.2)),
    "GSPO keeps its own clip": (GRPOModule, {"policy_loss": "gspo_loss"}, partial(gspo_loss, denominator=SEQUENCES)),
    "a given one holds": (
        GRPOModule, {"policy_loss": "gspo_loss"} | NARROW, partial(gspo_loss, denominator=SEQUENCES, **NARROW)
    ),
    "a user's own": (
        GRPOModule,
        {"policy_loss": plain, "policy_loss_arguments": {"scale": 2.0}},
        lambda *inputs, denominator: plain(*inputs, scale=2.0),
    ),
    "with arguments": (GRPOModule, {"policy_loss": LARGER}, LARGER),
    "with arguments, as plain values": (
        GRPOModule, {"policy_loss": {"class_path": "cispo_loss", "init_args": {"ratio_max": 1.5}}}, LARGER
    ),
    "that hands knobs on": (GRPOModule, {"policy_loss": wrapped, "clip_high": 0.3}, partial(ppo_loss, clip_high=0.3)),
    "in another order": (GRPOModule, {"policy_loss": in_another_order}, ppo_loss),
    "an argument named like one of the module": (
        GRPOModule, {"policy_loss": "kl_cov_loss", "policy_loss_arguments": KL_COV}, partial(kl_cov_loss, **KL_COV)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_a_loss_is_given_what_it_names_and_remembered(name: str) -> None:
    kind, arguments, function = CALLED[name]
    batch, inputs = prepared()
    module = kind("anywhere", **arguments)
    expected = function(*inputs, **{"denominator": TOKENS} | getattr(function, "keywords", {})).loss
    for made in (module, kind(**module.hparams)):
        torch.testing.assert_close(loss_of(made, batch, inputs[0]).loss, expected, rtol=0, atol=0)
