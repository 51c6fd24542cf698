"""Formulas of the parts that weight tokens, of what they are measured by, and of entropies, by hand."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import PlainGRPO, ahead, digits, fit_run
from torch import Tensor

from modules.on_policy.test_base import experience
from rlhfkit import Prompt, RolloutCallback, Sample, SamplingSpec, SFTDataModule
from rlhfkit.modules.parts import (
    Correction,
    EntropyBonus,
    EntropyTarget,
    LogLinear,
    NoCorrection,
    OffPolicyMask,
    PretrainingLoss,
    Rejection,
    TopEntropy,
)
from rlhfkit.modules.parts.correction import EngineMismatch
from rlhfkit.parts import Part

from .cases import Case, attached, case, fit, output_of


async def distant_engine(prompt: Prompt, size: int, sampler: Any) -> list[Sample]:
    """Samples of an engine whose log-probs of every third token differ from the trainer's by 0.3 nats."""
    samples: list[Sample] = await sampler.sample(prompt, size)
    for sample in samples:
        pairs = zip(sample.token_ids.tolist(), sample.logprobs.tolist(), strict=True)
        sample.logprobs = [logprob - 0.3 * (token % 3 == 0) for token, logprob in pairs]
    return samples


def short_texts(world: int) -> SFTDataModule:
    """Texts of different lengths, eight in an update."""
    rows = [{"text": "ab " * (1 + row % 4) + str(row)} for row in range(20)]
    return SFTDataModule(rows, text="text", micro_batch_size=4 // world)


kept = {"metrics": ("policy/kept_fraction",)}
case(partial(Rejection, "token", divergence="k2", high=0.01), group=distant_engine, **kept)("test_token_filter.py")
case(partial(Correction, {"high": 0.9}))("test_token_filter.py")
case(NoCorrection, always=True)("test_base.py")
case(partial(TopEntropy, 0.5), **kept)("test_token_filter.py")
case(partial(OffPolicyMask, 1e-4), **kept)("test_token_filter.py")
case(partial(PretrainingLoss, 0.3), metrics=("ptx/loss",), text=short_texts)("test_ppo.py")


@case(LogLinear)
def log_linear_formula(folder: Path) -> None:
    """On the line through two policy versions, without a forward pass, also of samples that were drawn ahead."""
    checked: set[tuple[int, int]] = set()

    class Between(Part):
        def loaded(self) -> None:
            self.module.passes.statistics = None

        def observe(self, batch: Any, out: Any, old: Any) -> dict[str, Any]:
            updates, mask = self.module.trainer.global_step, batch.action_mask
            begun = updates // 2 * 2  # two updates an iteration
            share = torch.ones(()) if updates == begun else (begun - batch.versions) / (updates - batch.versions)
            expected = (1 - share) * batch.rollout_logprobs + share * out.logprobs.detach()
            torch.testing.assert_close(old[mask], expected[mask], rtol=0, atol=1e-6)
            checked.update((updates - begun, begun - version) for version in batch.versions[mask].tolist())
            return {}

    rollouts = RolloutCallback(digits, sampling=SamplingSpec(group_size=4, max_new_tokens=8), parts=ahead(1))
    arguments = {"parts": [LogLinear(), Between()], "lr": 0.05}
    fit_run(folder, module=PlainGRPO, module_arguments=arguments, rollouts=rollouts, max_epochs=3)
    assert checked >= {(0, 0), (1, 0), (0, 2), (1, 2)}


MISMATCHES = tuple(
    f"rollout_corr/{name}"
    for name in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl", "untruncated_eff_sample_size")
)


@case(EngineMismatch, metrics=MISMATCHES, always=True)
def mismatch_formula(folder: Path) -> None:
    """Means over the tokens that the engine gave a log-prob, without replayed answers; NaN where there is none."""
    batch = experience()
    out, old = output_of(batch), batch.rollout_logprobs + 0.05 * torch.arange(-18.0, 18.0).reshape(6, 6)
    batch.rollout_logprobs[0, 2] = math.nan
    part = EngineMismatch()

    def measured() -> dict[str, float]:
        return {name: float(value) for name, value in part.observe(batch, out, old).items()}

    def expected(rows: list[int]) -> dict[str, float]:
        gaps = (old - batch.rollout_logprobs)[rows][batch.action_mask[rows]].double()
        gaps = gaps[~gaps.isnan()]
        ratios = gaps.exp()
        effective = ratios.sum() ** 2 / (len(gaps) * (ratios**2).sum())
        found = gaps.abs().mean(), gaps.abs().max(), (ratios - 1 - gaps).mean(), effective
        return dict(zip(MISMATCHES, map(float, found), strict=True))

    assert measured() == pytest.approx(expected([*range(6)]), rel=1e-5)
    batch.replayed = torch.tensor([False, True, True, False, True, True])
    assert measured() == pytest.approx(expected([0, 3]), rel=1e-5)
    batch.rollout_logprobs[:] = math.nan
    assert all(math.isnan(value) for value in measured().values())


@case(partial(EntropyBonus, 0.1))
def entropy_bonus_formula(folder: Path) -> None:
    """Minus ``coef`` times the mean entropy of the step's 40 tokens, as this micro-batch's share of two."""
    batch = experience()
    out = output_of(batch)
    loss = attached(EntropyBonus(0.25)).term(batch, out, out.logprobs.detach()).loss
    entropy: Tensor = out.entropy  # type: ignore[assignment]
    total = sum(entropy.detach()[batch.action_mask].tolist())
    torch.testing.assert_close(loss.item(), -0.25 * total / 40 * 2)
    loss.backward()
    gradient: Tensor = entropy.grad  # type: ignore[assignment]
    torch.testing.assert_close(gradient, -0.25 * 2 / 40 * batch.action_mask.float())


@case(partial(EntropyTarget, 100.0, step=0.02), metrics=("policy/entropy_coef",))
def entropy_target_formula(folder: Path) -> None:
    """The weight rises below the target, falls above it, and acts below only: the rule of section 4 by hand."""

    def weights(target: float, place: str) -> tuple[list[float], list[float]]:
        entropies: dict[int, float] = {}
        applied: list[float] = []
        part = EntropyTarget(target, step=0.3)

        class Watch(Part):
            outputs = ("entropy",)

            def observe(self, batch: Any, out: Any, old: Any) -> dict[str, Any]:
                step = self.module.global_step
                if step not in entropies:
                    applied.append(part.applied)
                mean = float((out.entropy.detach() * batch.action_mask).sum()) / batch.step_tokens
                entropies[step] = entropies.get(step, 0.0) + mean
                return {}

        fit(folder / place, Case(lambda: part, entropy_target_formula), parts=[part, Watch()], max_epochs=3)
        return list(entropies.values()), applied

    entropies, applied = weights(100.0, "below")
    torch.testing.assert_close(applied, [0.0, 0.3, 0.6, 0.9, 1.2, 1.5])
    target = sorted(entropies)[2] + 1e-4  # crossed within the run
    entropies, applied = weights(target, "across")
    coefficient, expected = 0.0, [0.0]
    for entropy in entropies:
        coefficient = max(0.0, coefficient + (0.3 if entropy < target else -0.3))
        expected.append(coefficient if entropy <= target else 0.0)
    assert len({*expected}) > 2
    torch.testing.assert_close(applied, expected[:-1])
