"""Filters, KL options and the approximated proximal policy, against the loss functions called by hand.

Covers modules/parts/token_filters.py and correction.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import PlainGRPO, ahead, digits, fit_run

from rlhfkit import GRPOModule, RolloutCallback, SamplingSpec
from rlhfkit.losses import (
    importance_weights,
    off_policy_sequence_mask,
    ppo_loss,
    rejection_mask,
    top_entropy_mask,
)
from rlhfkit.models import PolicyOutput
from rlhfkit.modules.parts import Correction
from rlhfkit.modules.parts.old_policy import LogLinear
from rlhfkit.modules.parts.token_filters import OffPolicyMask, Rejection, TopEntropy, nth_largest_of_all

from .test_functions import prepared

REJECTION: dict[str, Any] = {"level": "token", "divergence": "k2", "high": 0.02}


def test_a_token_that_fails_one_of_several_tests_has_weight_0_and_counts() -> None:
    batch, (logprobs, old, _, mask) = prepared()
    engine, entropy = batch.rollout_logprobs, torch.rand(6, 6, generator=torch.Generator().manual_seed(3))
    entropies = TopEntropy(0.5)
    batch = entropies.prepare(batch.with_columns(entropy=entropy))
    kept = {
        entropies: top_entropy_mask(entropy, mask, fraction=0.5),
        # One answer is 0.107 nats away, another one 0.119, and all others are near.
        OffPolicyMask(0.11): off_policy_sequence_mask(batch.advantages, logprobs, engine, mask, threshold=0.11),
        Rejection(**REJECTION): rejection_mask(old, engine, mask, **REJECTION),
    }
    weights = torch.stack([*kept.values()]).all(0).float()
    assert 0 < weights[mask].sum() < mask.sum()
    weights = weights * importance_weights(old, engine, mask).weights
    module = GRPOModule("anywhere", policy_loss="ppo_loss", parts=[Correction("tis"), *kept])
    found = module.loss(batch, PolicyOutput(logprobs, None))
    expected = ppo_loss(logprobs, old, batch.advantages, mask, weights=weights, denominator=20.0)
    torch.testing.assert_close(found.loss, expected.loss)
    for number, (part, passed) in enumerate(kept.items()):
        metric = "policy/kept_fraction" + (f"/{type(part).__name__}" if number else "")
        torch.testing.assert_close(found.metrics[metric], passed[mask].float().mean())
    assert module.uses_rollout_logprobs
    assert not GRPOModule("anywhere", parts=[TopEntropy(0.5)]).uses_rollout_logprobs


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


class Proximal(PlainGRPO):
    """Compares the log-probs that the ratio is to with the line through two policy versions."""

    checked: Any = ()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.passes.statistics = None  # type: ignore[assignment]  # log-linear proximal log-probs need no forward pass

    def loss(self, batch: Any, out: Any) -> Any:
        if self._trainer is not None and torch.is_grad_enabled():
            updates, mask = self.trainer.global_step, batch.action_mask
            begun = updates // 2 * 2  # two updates an iteration
            old, now, engine = self.old_logprobs(batch, out), out.logprobs.detach(), batch.rollout_logprobs
            share = torch.ones(()) if updates == begun else (begun - batch.versions) / (updates - batch.versions)
            expected = (1 - share) * engine + share * now
            torch.testing.assert_close(old[mask], expected[mask], rtol=0, atol=1e-6)
            self.checked = {*self.checked, *((updates - begun, begun - one) for one in batch.versions[mask].tolist())}
        return super().loss(batch, out)


def test_log_linear_log_probs_lie_between_engine_and_policy(tmp_path: Path) -> None:
    """Of samples that were drawn while the policy before them was trained on, after a first iteration of its own."""
    sampling = SamplingSpec(group_size=4, max_new_tokens=8)
    _, module, _ = fit_run(
        tmp_path,
        module=Proximal,
        module_arguments={"parts": [LogLinear()], "lr": 0.05},
        rollouts=RolloutCallback(digits, sampling=sampling, parts=ahead(1)),
        max_epochs=3,
    )
    assert module.checked >= {(0, 0), (1, 0), (0, 2), (1, 2)}  # type: ignore[attr-defined]
