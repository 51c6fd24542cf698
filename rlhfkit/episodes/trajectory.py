"""``Trajectory``: the tokens of an episode as the engine made and read them, until they are a ``Sample``."""

import math
from typing import Any, Self

from rlhfkit.data.types import FinishReason, Prompt, Sample


class Trajectory:
    """What was said so far.

    Args:
        prompt: Its ``token_ids`` are what the engine is given first.
        sample_index: Position in the group.
    """

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.prompt = prompt
        self.sample_index = sample_index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.action_mask: list[bool] = []
        self.rewards: dict[int, float] = {}
        """What was earned, by the position of the token that earned it."""
        self.turns = 0
        self.last_action: Sample | None = None
        """The last action."""

    @property
    def context(self) -> list[int]:
        """Everything, as the engine is to read it."""
        return self.prompt.token_ids + self.token_ids

    @property
    def num_action_tokens(self) -> int:
        """Tokens that the policy has chosen."""
        return sum(self.action_mask)

    def add_action(self, sampled: Sample) -> None:
        """Append what the policy said.

        Args:
            sampled: As it came from the engine.
        """
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.versions += sampled.versions
        self.action_mask += [True] * len(sampled.token_ids)
        self.turns += 1
        self.last_action = sampled

    def add_observation(self, token_ids: list[int], version: int) -> None:
        """Append what the policy reads.

        Args:
            token_ids: Nothing of it is learned.
            version: Of the policy at that time.
        """
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [version] * len(token_ids)
        self.action_mask += [False] * len(token_ids)

    def add_reward(self, reward: float) -> None:
        """Reward the last action, at its last token.

        Args:
            reward: Added to what it has.

        Raises:
            ValueError: If it is not finite, or there was no action.
        """
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number, got {reward}")
        position = max((place for place, chosen in enumerate(self.action_mask) if chosen), default=None)
        if position is None:
            if reward:
                raise ValueError(f"a reward of {reward} was given before the policy has said anything")
            return
        self.rewards[position] = self.rewards.get(position, 0.0) + reward

    def copy(self) -> Self:
        """Another one that goes on from here."""
        other = type(self)(self.prompt, self.sample_index)
        for name in ("token_ids", "logprobs", "versions", "action_mask"):
            setattr(other, name, list(getattr(self, name)))
        other.rewards, other.turns, other.last_action = dict(self.rewards), self.turns, self.last_action
        return other

    def sample(self, finish_reason: FinishReason, info: dict[str, Any]) -> Sample:
        """The record of it.

        Args:
            finish_reason: Why it ended.
            info: What else is known.
        """
        return Sample(
            self.prompt,
            self.sample_index,
            self.token_ids,
            self.logprobs,
            self.versions,
            finish_reason,
            action_mask=self.action_mask,
            token_rewards=[self.rewards.get(place, 0.0) for place in range(len(self.token_ids))],
            info=info,
        )
