"""``Environment``: what the policy interacts with; reset with a prompt, then called with one action after another.

Each episode has its own environment object, so attributes can hold its state. Methods may be ``async``; plain ones run
in a separate thread, so they may block.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfkit.data.types import FinishReason, Prompt

Message = Mapping[str, Any]
"""A chat message: ``{"role": "tool", "content": "42"}``. The content may be a list of parts, for a model that sees also
images: ``{"type": "image", "image": path, bytes, data: URL or Pillow image}``.
"""

Observation = str | Sequence[Message] | Sequence[int]
"""What the policy reads next: text, chat messages (formatted by the model's chat template), or token ids."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    turn: int
    """Counted from 0."""
    token_ids: list[int]
    """The sampled tokens."""
    text: str
    """The text without special tokens."""
    raw_text: str
    """The text with special tokens, for formats that use them."""
    finish_reason: FinishReason
    """``"length"``: truncated at ``SamplingSpec.max_new_tokens``."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's response to an action."""

    observation: Observation | None = None
    """What the policy reads next; not used when ``done``."""
    reward: float | None = 0.0
    """Reward of this action; an episode's reward is the sum. ``None``: it cannot be scored, and the episode is not
    trained on.
    """
    done: bool = False
    """Whether the episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, kept in ``Sample.info["steps"]``."""


class Environment(ABC):
    """Base class of environments; only :meth:`step` must be defined.

    Example::

        class GuessTheNumber(Environment):
            def reset(self, prompt):
                self.number = int(prompt.answer)

            def step(self, action):
                guess = int(action.text)
                if guess == self.number:
                    return Step(reward=1.0, done=True)
                return Step([{"role": "user", "content": "higher" if guess < self.number else "lower"}])


        RolloutCallback(engine=VLLMPool(2), group=Episodes(GuessTheNumber), reward=EnvironmentReward())
    """

    def reset(self, prompt: Prompt) -> Observation | Awaitable[Observation | None] | None:
        """Start an episode for a prompt, a row of the data set.

        Returns:
            ``None``: the policy reads the prompt. Text or token ids: appended to the prompt. Chat messages: they
                replace the prompt.
        """
        return None

    @abstractmethod
    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Respond to an action of the policy."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the episode used. Called once, however the episode ends."""
        return None
