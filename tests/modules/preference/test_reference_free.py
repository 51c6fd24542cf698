"""SimPO, CPO and ORPO modules against formulas written by hand on a model's own log-probs, and where they end up."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_sgd import PlainSGD

from modules import dpo_cases
from modules.data_runs import folder_of
from rlhfkit import CPOModule, ORPOModule, PreferenceModule, SimPOModule
from rlhfkit.data.formats import collate_preferences
from rlhfkit.models import ModelLoading

folder = folder_of(dpo_cases.prepare)


def log_odds(mean: float) -> float:
    return mean - math.log(1 - math.exp(mean))


def simpo(c: float, r: float, nc: int, nr: int, mean: float) -> float:
    return math.log1p(math.exp(-(2.5 * (c / nc - r / nr) - 0.5)))


def cpo(c: float, r: float, nc: int, nr: int, mean: float) -> float:
    return math.log1p(math.exp(-0.1 * (c - r))) - c / mean


def orpo(c: float, r: float, nc: int, nr: int, mean: float) -> float:
    return -c / mean + 0.2 * math.log1p(math.exp(log_odds(r / nr) - log_odds(c / nc)))


CASES: list[tuple[type[PreferenceModule], dict[str, Any], Callable[..., float]]] = [
    (SimPOModule, {"beta": 2.5, "gamma": 0.5}, simpo),
    (CPOModule, {}, cpo),
    (ORPOModule, {"beta": 0.2}, orpo),
]


def plain_sgd(kind: type[PreferenceModule]) -> type[PreferenceModule]:
    """The module with SGD."""
    return type("Plain", (PlainSGD, kind), {})


@pytest.mark.parametrize(("kind", "options", "formula"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_a_step_has_the_value_of_the_formula(
    folder: Path, kind: type[PreferenceModule], options: dict[str, Any], formula: Callable[..., float]
) -> None:
    steps = dpo_cases.Steps()
    module = plain_sgd(kind)(str(folder / "model"), lr=2e-3, **options)
    run = dpo_cases.trainer(folder, callbacks=[steps], precision="64-true")
    source = dpo_cases.data(folder, 24, shuffle=False)
    run.fit(module, source)  # two steps on all pairs
    fresh = kind(str(folder / "model"), loading=ModelLoading(attention="eager"))
    fresh.configure_model()
    losses = []
    for state in (None, steps.weights):
        if state is not None:
            fresh.policy.load_state_dict(state)
        batch = collate_preferences([source.examples[row] for row in range(24)])
        with torch.no_grad():
            logps = fresh.answer_logprobs(batch, fresh.policy_output(batch).logprobs).double()
        lengths = batch.loss_mask.sum(-1)
        mean = float(lengths[::2].double().mean())
        terms = zip(
            logps[::2].tolist(), logps[1::2].tolist(), lengths[::2].tolist(), lengths[1::2].tolist(), strict=True
        )
        losses.append(sum(formula(*pair, mean) for pair in terms) / 24)
    assert steps.losses[0] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] < steps.losses[1] < losses[0]
