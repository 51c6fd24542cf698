"""The states after the last action of answers that were cut off, whose values stand for rewards that did not come."""

import dataclasses

import torch
from torch import Tensor

from rlhfkit.data.types import Experience


def with_final_states(experience: Experience, rows: Tensor) -> tuple[Experience, Tensor]:
    """Append a token to some sequences, so that a critic also gives the value of the state after their last token.

    A causal model's value of that state does not depend on the token, which is 0.

    Args:
        experience: B sequences of at most T tokens.
        rows: (B,) bool, the sequences.

    Returns:
        Sequences of at most T + 1 tokens, in whose action mask the appended tokens are too, and (B, T) bool, true at
        these.
    """
    longer, length = experience.pad(experience.input_ids.shape[1] + 1), experience.input_ids.shape[1]
    final = (torch.arange(length) == (experience.lengths - 1)[:, None]) & rows[:, None]
    attention = torch.arange(length + 1) < (experience.lengths + rows)[:, None]
    return dataclasses.replace(longer, attention_mask=attention, action_mask=longer.action_mask | final), final
