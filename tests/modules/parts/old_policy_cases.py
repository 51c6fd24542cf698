"""Formulas of the parts that know the policy before an iteration, and how far it is from the engine, by hand."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfkit.modules.parts.correction import EngineMismatch
from rlhfkit.parts import Part, Stage


def old_logprobs_formula(folder: Path) -> None:
    """Those of the policy before the iteration, of later updates only unless a part reads them, and its entropy."""
    from .cases import CASES, fit

    class Reads(Part):
        reads = ("old_logprobs", "entropy")
        stage = Stage.ADAPT

        def prepare(self, rows: Any) -> Any:
            seen.append((rows, self.module.passes.statistics(self.module.policy, rows, entropy=True)))
            return rows

    class Later(Reads):
        reads = ()

    for part, of_all in ((Later(), False), (Reads(), True)):
        seen: list[tuple[Any, Any]] = []
        fit(folder, dataclasses.replace(CASES["OldLogprobs"], data={}, trainer={}), parts=[part])  # one epoch
        assert len(seen) == 2
        for rows, expected in seen:
            chosen = rows.update >= 0 if of_all else rows.update > 0
            wanted = rows.action_mask & chosen[:, None]
            assert 0 < wanted.sum() <= rows.action_mask.sum()
            assert torch.equal(rows.old_logprobs, expected.logprobs.where(wanted, 0.0))
            assert ("entropy" in rows.columns) == of_all
            if of_all:
                assert torch.equal(rows.columns["entropy"], expected.entropy)
    kept_logprobs_formula(folder)


def kept_logprobs_formula(folder: Path) -> None:
    """In the second epoch a micro-batch's old log-probs are those that the policy gave it in the first."""
    from .cases import CASES, fit

    given: list[torch.Tensor] = []
    taken: list[torch.Tensor] = []

    class Watch(Part):
        def observe(self, batch: Any, out: Any, old: Any) -> dict[str, Any]:
            given.append(out.logprobs.detach())
            taken.append(old)
            return {}

    fit(folder, CASES["OldLogprobs"], parts=[Watch()])
    assert len(given) == 16  # two iterations of two epochs of four micro-batches
    for first in (0, 8):
        for place in range(first, first + 4):
            assert torch.equal(taken[place], given[place])
            assert torch.equal(taken[place + 4], given[place])
            assert not torch.equal(taken[place + 4], given[place + 4])


def mismatch_formula(folder: Path) -> None:
    """Means over the tokens that the engine gave a log-prob, without replayed answers; NaN where there is none."""
    from .cases import batch_of, output_of

    batch = batch_of()
    out, old = output_of(batch), batch.rollout_logprobs + 0.1 * torch.arange(-5.0, 5.0).reshape(2, 5)
    batch.rollout_logprobs[0, 1] = math.nan
    part = EngineMismatch()

    def measured() -> dict[str, float]:
        return {name.split("/")[1]: float(value) for name, value in part.observe(batch, out, old).items()}

    def expected(rows: list[int]) -> dict[str, float]:
        gaps = [
            float(old[row, step] - batch.rollout_logprobs[row, step])
            for row, step in batch.action_mask.nonzero().tolist()
            if row in rows and not math.isnan(batch.rollout_logprobs[row, step])
        ]
        ratios = [math.exp(gap) for gap in gaps]
        return {
            "logprob_abs_diff_mean": sum(map(abs, gaps)) / len(gaps),
            "logprob_abs_diff_max": max(map(abs, gaps)),
            "k3_kl": sum(ratio - 1 - gap for ratio, gap in zip(ratios, gaps, strict=True)) / len(gaps),
            "untruncated_eff_sample_size": sum(ratios) ** 2 / (len(gaps) * sum(ratio**2 for ratio in ratios)),
        }

    assert measured() == pytest.approx(expected([0, 1]), rel=1e-5)
    batch.replayed = torch.tensor([False, True])
    assert measured() == pytest.approx(expected([0]), rel=1e-5)
    batch.rollout_logprobs[:] = math.nan
    assert all(math.isnan(value) for value in measured().values())
