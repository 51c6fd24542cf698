"""``Trajectory``: the tokens of an unfinished episode, as the engine sampled and read them."""

import dataclasses
import math
from typing import Any, Self

from rlhfkit.data.types import FinishReason, Prompt, Sample


class Trajectory:
    """The tokens of an episode so far; the prompt's ``token_ids`` are the initial context."""

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.prompt = prompt
        self.sample_index = sample_index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.action_mask: list[bool] = []
        self.rewards: dict[int, float] = {}
        """Rewards by the position of the token that earned them."""
        self.observed: tuple[Any, ...] = ()
        """Images of observations, in the order of their tokens."""
        self.turns = 0
        self.last_action: Sample | None = None
        """The last action, as sampled."""

    @property
    def context(self) -> list[int]:
        """All token ids, prompt included, that the engine reads next."""
        return [*self.prompt.token_ids.tolist(), *self.token_ids]

    @property
    def attachments(self) -> tuple[Any, ...]:
        """The images of all tokens, prompt included."""
        return (*self.prompt.attachments, *self.observed)

    @property
    def num_action_tokens(self) -> int:
        """Number of tokens that the policy has sampled."""
        return sum(self.action_mask)

    def add_action(self, sampled: Sample) -> None:
        """Append what the policy sampled."""
        self.token_ids += sampled.token_ids.tolist()
        self.logprobs += sampled.logprobs.tolist()
        self.versions += sampled.versions.tolist()
        self.action_mask += [True] * sampled.num_tokens
        self.turns += 1
        self.last_action = sampled

    def add_observation(self, token_ids: list[int], version: int, images: tuple[Any, ...] = ()) -> None:
        """Append tokens that the policy reads but does not learn, with their images; ``version`` is the policy's."""
        self.observed += images
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [version] * len(token_ids)
        self.action_mask += [False] * len(token_ids)

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last action's last token; raises ``ValueError`` without one, or if it is not finite."""
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be a finite number, got {reward}")
        position = max((place for place, chosen in enumerate(self.action_mask) if chosen), default=None)
        if position is None:
            if reward:
                raise ValueError(f"a reward of {reward} was given before the first action")
            return
        self.rewards[position] = self.rewards.get(position, 0.0) + reward

    def copy(self) -> Self:
        """Return a copy that can be continued independently."""
        other = type(self)(self.prompt, self.sample_index)
        for name in ("token_ids", "logprobs", "versions", "action_mask"):
            setattr(other, name, list(getattr(self, name)))
        other.rewards, other.turns, other.last_action = dict(self.rewards), self.turns, self.last_action
        other.observed = self.observed
        return other

    def sample(self, finish_reason: FinishReason, info: dict[str, Any]) -> Sample:
        """Return the trajectory as a sample, whose prompt has the images of observations behind its own."""
        return Sample(
            dataclasses.replace(self.prompt, attachments=self.attachments) if self.observed else self.prompt,
            self.sample_index,
            self.token_ids,
            self.logprobs,
            self.versions,
            finish_reason,
            action_mask=self.action_mask,
            token_rewards=[self.rewards.get(place, 0.0) for place in range(len(self.token_ids))],
            info=info,
        )
