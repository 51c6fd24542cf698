"""Samples as rewards get them, and what they get for them."""

from collections.abc import Sequence
from typing import Any

from tiny_models import prompts_of, tiny_tokenizer

from rlhfkit.data import Prompt, Sample
from rlhfkit.rewards.base import score_samples


def sampled(
    text: str = "",
    answer: Any = None,
    *,
    prompt: int = 0,
    place: int = 0,
    tokens: Sequence[int] = (3,),
    action_mask: list[bool] | None = None,
    **metadata: Any,
) -> Sample:
    """A completion; ``metadata`` are further columns of its prompt."""
    asked, count = Prompt(prompt, [1, 2], "1+1=", answer, metadata), len(tokens)
    return Sample(asked, place, list(tokens), [-0.1] * count, [0] * count, "stop", action_mask, text=text)


def tokenized(*texts: str, question: str = "1+1=") -> list[Sample]:
    """Answers to one question in tokens of the tiny models, each with its end-of-sequence token."""
    tokenizer, (prompt,) = tiny_tokenizer(), prompts_of([question], answers=["2"])
    rows = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    return [
        Sample(prompt, place, row, [0.0] * len(row), [0] * len(row), "stop", text=text)
        for place, (text, row) in enumerate(zip(texts, rows, strict=True))
    ]


def scored(reward: Any, given: Sequence[Sample]) -> list[float | None]:
    """The rewards that samples get."""
    score_samples(reward, given)
    return [one.reward for one in given]
