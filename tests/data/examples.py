"""Samples and examples that tests of batches and loaders share, and whether two batches are the same."""

from typing import Any

import torch

from rlhfkit.data import Experience, Prompt, Sample
from rlhfkit.data.batch import TokenExample
from rlhfkit.data.images import Image


class Table(list[TokenExample]):
    """Examples with their sizes."""

    @property
    def lengths(self) -> list[int]:
        return [len(example.input_ids) for example in self]

    @property
    def targets(self) -> list[int]:
        return [example.targets for example in self]


def sample(prompt: int, prompt_length: int, length: int, index: int = 0, **changes: Any) -> Sample:
    """A sample whose tokens and log-probs tell their place, and whose reward is its place in the group."""
    fields = {
        "prompt": Prompt(prompt, list(range(1, prompt_length + 1))),
        "sample_index": index,
        "token_ids": [50 + token for token in range(length)],
        "logprobs": [-0.5 - token for token in range(length)],
        "versions": [3] * length,
        "finish_reason": "stop",
        "reward": float(index),
    }
    return Sample(**(fields | changes))


def random_samples(count: int, generator: torch.Generator) -> list[Sample]:
    """Samples of any length, with or without a reward, its parts, images and rewards of tokens; two of each prompt."""
    made = []
    for row in range(count):
        length = int(torch.randint(9, (1,), generator=generator))
        images = (Image(bytes([row]), f"image {row}"),) if row % 4 == 3 else ()
        prompt = Prompt(row // 2, list(range(1, 2 + row % 4)), attachments=images)
        record = Sample(prompt, row % 2, [row + 10] * length, [-0.125 * row] * length, [row] * length, "stop")
        if row % 3:
            record.action_mask = [bool((place + row) % 3) for place in range(length)]
        if row % 5:
            record.reward = row / 7
            record.reward_parts = {("format", "right")[row % 2]: row / 3}
        if row == 4:
            record.token_rewards = [0.5] * length
        made.append(record)
    return made


def with_columns(experience: Experience, generator: torch.Generator) -> Experience:
    """As a module has prepared it: one number of each token, and several (experts, a teacher's likeliest tokens)."""
    steps = experience.action_mask
    choices = torch.randint(1, 9, (*steps.shape, 3), generator=generator) * steps[..., None]
    return experience.with_columns(
        values=torch.rand(steps.shape, generator=generator) * steps,
        routing=choices.to(torch.int16),
        teacher_top_logprobs=choices / -7,
        teacher_top_ids=choices.int(),
    )


def assert_same(found: Experience, expected: Experience) -> None:
    """Types, shapes and values of all fields, but the iteration that they are of."""
    assert found.attachments == expected.attachments
    for name in vars(expected).keys() - {"attachments", "iteration"}:
        one, other = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=f"{name}: {one} and {other}")
