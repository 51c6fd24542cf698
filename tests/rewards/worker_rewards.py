"""Rewards that worker processes import."""

import os
from collections.abc import Sequence

import torch

from rewards.obedient_reward import obedient
from rlhfkit import Sample
from rlhfkit.rewards import WeightedSum


def process(samples: Sequence[Sample]) -> list[float]:
    """In which process they are scored."""
    return [float(os.getpid())] * len(samples)


def of_group(samples: Sequence[Sample]) -> list[float]:
    """How many samples of the same prompt were given."""
    indices = [sample.prompt.index for sample in samples]
    return [float(indices.count(index)) for index in indices]


async def tokens(samples: Sequence[Sample]) -> list[float]:
    """The last token, from whole samples."""
    assert all(isinstance(sample, Sample) for sample in samples)
    return [float(sample.token_ids.tolist()[-1]) + sample.logprobs.tolist()[-1] for sample in samples]


class Counting:
    """Has metrics, and a value that grows with training."""

    progress = 0

    def set_progress(self, *, step: int, epoch: int) -> None:
        self.progress = step + 100 * epoch

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        return [1.0 + self.progress] * len(samples)

    def metrics(self) -> dict[str, float]:
        return {"counting/calls": 2.0}


def centred(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    return values - torch.stack([values[group == one].nanmean() for one in group])


several = WeightedSum(length=obedient, last=(tokens, 0.5), one=Counting(), missing="skip", normalize=centred)
