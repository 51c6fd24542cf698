"""What the policy talks to: an ``Environment``, which is reset with a prompt and then answers one action after another.

There is one environment object per episode, so it may keep whatever it likes in its attributes. Methods are either
``async`` or plain functions; plain ones run in a thread of their own, so that they may block.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhfkit.data.types import FinishReason, Prompt

Message = Mapping[str, Any]
"""A chat message: ``{"role": "tool", "content": "42"}``."""

Observation = str | Sequence[Message] | Sequence[int]
"""What the policy reads next: text as it is, chat messages (written by the model's chat template), or token ids."""


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of the policy."""

    turn: int
    """From 0."""
    token_ids: list[int]
    """Exactly as sampled."""
    text: str
    """The same as text, special tokens left out."""
    raw_text: str
    """The same with special tokens, for formats that are made of them."""
    finish_reason: FinishReason
    """``"length"``: cut off at ``SamplingSpec.max_new_tokens``."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to an action."""

    observation: Observation | None = None
    """What the policy reads next; not used when ``done``."""
    reward: float | None = 0.0
    """Earned by this action. An episode's reward is the sum; ``None``: this one cannot be judged, and the whole episode
    is not trained on."""
    done: bool = False
    """The episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Plain values, kept in ``Sample.info["steps"]``."""


class Environment:
    """Base class of environments; only :meth:`step` has to be defined.

    Example::

        class GuessTheNumber(Environment):
            def reset(self, prompt):
                self.number = int(prompt.answer)

            def step(self, action):
                guess = int(action.text)
                if guess == self.number:
                    return Step(reward=1.0, done=True)
                return Step([{"role": "user", "content": "higher" if guess < self.number else "lower"}])


        RolloutCallback(engine=EpisodeEngine(VLLMPool(2), GuessTheNumber), reward=EpisodeReward())
    """

    def reset(self, prompt: Prompt) -> Observation | Awaitable[Observation | None] | None:
        """Begin an episode.

        Args:
            prompt: Row of the data set.

        Returns:
            ``None``: the policy reads the prompt as it is. Text or token ids: the prompt, and that behind it. Chat
            messages: that conversation in place of the prompt's tokens.
        """
        return None

    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Answer an action.

        Args:
            action: What the policy said.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define step(action), which returns a Step")

    def close(self) -> Awaitable[None] | None:
        """Free what the episode used. Called once, however it ended."""
        return None
