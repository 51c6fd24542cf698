"""Formulas of the parts that weight tokens, and of what they are measured by, by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhfkit.modules.parts.correction import EngineMismatch
from rlhfkit.modules.parts.token_filters import OffPolicyMask, TopEntropy


def inputs() -> Any:
    """A micro-batch, the policy's output for it, and old log-probs that differ from the engine's."""
    from .cases import batch_of, output_of

    batch = batch_of()
    batch.advantages = batch.advantages.contiguous()
    old = batch.rollout_logprobs + 0.1 * torch.arange(-5.0, 5.0).reshape(2, 5)
    return batch, output_of(batch), old


def weights(part: Any, batch: Any, out: Any, old: Any) -> Any:
    """Factors of the tokens, one row each."""
    from .cases import attached

    return attached(part).weigh(batch, out, old)


def top_entropy_formula(folder: Path) -> None:
    """Half of the eight trained tokens, those of the highest entropies, and of masked answers none."""
    from .cases import attached

    batch, out, old = inputs()
    entropy = out.entropy.detach()
    part: Any = attached(TopEntropy(0.5))
    rows = part.prepare(batch.with_columns(entropy=entropy))
    values = sorted(entropy[batch.action_mask].tolist(), reverse=True)
    kept, metrics = part.weigh(rows, out, old)
    expected = entropy[batch.action_mask] >= values[int(0.5 * 7 + 1e-4)]
    assert torch.equal(kept[batch.action_mask], expected.float())
    torch.testing.assert_close(metrics["policy/kept_fraction"], expected.float().mean())


def off_policy_formula(folder: Path) -> None:
    """An answer of negative advantage goes where the engine's log-probs are above the policy's on average."""
    batch, out, old = inputs()
    batch.rollout_logprobs = out.logprobs.detach() + 0.1
    for threshold in (0.11, 0.09):
        kept, _ = weights(OffPolicyMask(threshold), batch, out, old)
        assert bool((kept[0] == 1).all())  # its advantage is positive
        assert bool((kept[1][batch.action_mask[1]] == float(threshold > 0.1)).all())


def mismatch_formula(folder: Path) -> None:
    """Means over the tokens that the engine gave a log-prob, without replayed answers; NaN where there is none."""
    batch, out, old = inputs()
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
