"""Losses refuse arguments that are NaN, which pass checks of the form ``x <= 0`` and make every gradient NaN."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhfkit import losses

ROW = torch.zeros(1, 2)
MASK = torch.ones(1, 2, dtype=torch.bool)
ONE = torch.zeros(1)
LENGTH = torch.ones(1)

POLICY = lambda loss: lambda **knobs: loss(ROW, ROW, ROW, MASK, **knobs)  # noqa: E731

CASES: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("ppo", POLICY(losses.ppo_loss), ["clip_low", "clip_high", "dual_clip", "delta", "log_ratio_clamp"]),
    ("gspo", POLICY(losses.gspo_loss), ["clip_low", "clip_high", "log_ratio_clamp"]),
    ("sapo", POLICY(losses.sapo_loss), ["temperature_positive", "temperature_negative", "log_ratio_clamp"]),
    ("vespo", POLICY(losses.vespo_loss), ["k_positive", "lambda_positive", "k_negative", "lambda_negative"]),
    ("value", lambda **knobs: losses.value_loss(ROW, ROW, ROW, MASK, **knobs), ["clip"]),
    ("dpo", lambda **knobs: losses.dpo_loss(ONE, ONE, ONE, ONE, **knobs), ["beta", "label_smoothing"]),
    (
        "kto",
        lambda **knobs: losses.kto_loss(ONE, ONE, ONE == 0, ONE[0], **knobs),
        ["beta", "desirable_weight", "undesirable_weight"],
    ),
    ("simpo", lambda **knobs: losses.simpo_loss(ONE, ONE, LENGTH, LENGTH, **knobs), ["beta", "gamma"]),
    ("orpo", lambda **knobs: losses.orpo_loss(ONE, ONE, LENGTH, LENGTH, **knobs), ["beta"]),
    ("reward", lambda **knobs: losses.bradley_terry_loss(ONE, ONE, **knobs), ["centering", "label_smoothing"]),
    ("kl", lambda **knobs: losses.kl_estimate(ROW, ROW, **knobs), ["clamp"]),
    (
        "correction",
        lambda **knobs: losses.importance_weights(ROW, ROW, MASK, **knobs),
        ["low", "high", "log_ratio_clamp"],
    ),
]


@pytest.mark.parametrize(
    ("call", "knob"), [pytest.param(call, knob, id=f"{name}-{knob}") for name, call, knobs in CASES for knob in knobs]
)
def test_a_knob_that_is_nan_is_refused_by_name(call: Callable[..., Any], knob: str) -> None:
    call()
    with pytest.raises(ValueError, match="nan"):
        call(**{knob: math.nan})
