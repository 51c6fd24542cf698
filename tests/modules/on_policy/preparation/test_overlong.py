"""Answers that were cut off: what is masked, what is counted, and what is part of the baseline.

Covers ``modules/parts/rewards.py``.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import digits, setup_run

from rlhfkit import GRPOModule, PPOModule, RolloutCallback, SamplingSpec
from rlhfkit.losses import group_advantages
from rlhfkit.modules.parts import MaskTruncated
from rlhfkit.rewards import LengthPenalty, WeightedSum


class Batches(L.Callback):
    """Keeps every micro-batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch)


@pytest.mark.parametrize("module", [GRPOModule, PPOModule])
def test_cut_off_answers_are_not_learned_from_and_still_in_the_baseline(tmp_path: Path, module: Any) -> None:
    rollouts = RolloutCallback(
        # 8 tokens at most, and the last 4 of them cost up to 1: DAPO's soft punishment.
        WeightedSum(digits=digits, length=LengthPenalty(max_length=8, soft_zone=4)),
        sampling=SamplingSpec(group_size=4, max_new_tokens=8, stop=tuple("aeiouAEIOU")),
    )
    batches = Batches()
    trainer, made, data, _ = setup_run(
        tmp_path,
        module=module,
        module_arguments={"parts": [MaskTruncated().plain()]},
        rollouts=rollouts,
        callbacks=[batches],
        max_epochs=1,
    )
    trainer.fit(made, data)
    experience = rollouts.experience
    assert experience is not None
    cut = torch.tensor([sample.finish_reason == "length" for sample in rollouts.samples])
    assert 4 < cut.sum() < 28
    assert not experience.action_mask[cut].any()
    written = torch.tensor([len(sample.token_ids) for sample in rollouts.samples])
    assert torch.equal(experience.action_mask.sum(-1), written * ~cut)
    for number in (0, 1):
        tokens = int((written * ~cut)[experience.update == number].sum())
        assert {batch.step_tokens for batch in batches.seen if int(batch.update[0]) == number} == {tokens}
    rewards = torch.tensor([sample.reward for sample in rollouts.samples])
    expected = [digits([sample])[0] - max(len(sample.token_ids) - 4, 0) / 4 for sample in rollouts.samples]
    torch.testing.assert_close(rewards, torch.tensor(expected))
    if module is GRPOModule:
        advantages = group_advantages(rewards, experience.group)  # over all of a group
        for row in (~cut).nonzero()[:, 0].tolist():
            assert experience.advantages is not None
            torch.testing.assert_close(
                experience.advantages[row][experience.attention_mask[row, 1:]].unique(), advantages[row : row + 1]
            )
