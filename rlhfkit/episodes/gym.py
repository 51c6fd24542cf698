"""``GymEnvironment``: environments with the interface of Gymnasium, played in text."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from rlhfkit.data.types import Prompt
from rlhfkit.episodes.environment import Action, Environment, Message, Observation, Step
from rlhfkit.validation import check_number


class GymLike(Protocol):
    """What is used of ``gymnasium.Env``; the package itself is not needed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; returns an observation and facts."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return an observation, the reward, whether the task has ended, whether time is up, and facts."""
        ...

    def close(self) -> None:
        """Free what it uses."""
        ...


class GymEnvironment(Environment):
    """An :class:`~rlhfkit.episodes.Environment` around one with ``reset`` and ``step`` of Gymnasium.

    The first observation is text after the prompt unless ``first`` says otherwise; later ones are chat messages that
    answer the policy, or whatever ``show`` makes of them. All samples of a prompt begin with the same ``seed``.

    Example::

        def play() -> GymEnvironment:
            lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
            return GymEnvironment(lake, parse_action=lambda text: ["left", "down", "right", "up"].index(text.strip()))


        RolloutCallback(engine=VLLMPool(2), group=Episodes(play, max_turns=20), reward=EnvironmentReward())

    Args:
        environment: The environment; a new one for each episode.
        parse_action: Returns the action that a text of the policy means; raises ``ValueError`` if it means none.
        show: Returns an observation as the policy reads it: text, which becomes a message, or messages or token ids;
            ``None``: ``str``.
        role: Role of these messages; ``None``: text is appended as it is, for models without a chat template.
        invalid_reward: Reward of a text that means no action. The policy is told why, and nothing else happens.
        options: Returns ``options`` of ``reset`` for a prompt; ``None``: none are given.
        first: Returns what the policy reads first, for a prompt and the first observation: messages that take the
            prompt's place, text or token ids after it, or ``None``: the prompt alone.

    Raises:
        TypeError: If the environment has no ``reset`` and ``step``, or ``parse_action`` cannot be called.
        ValueError: If ``invalid_reward`` is no number.
    """

    def __init__(
        self,
        environment: GymLike,
        *,
        parse_action: Callable[[str], Any],
        show: Callable[[Any], Observation] | None = None,
        role: str | None = "user",
        invalid_reward: float = 0.0,
        options: Callable[[Prompt], dict[str, Any]] | None = None,
        first: Callable[[Prompt, Any], Observation | None] | None = None,
    ) -> None:
        if not callable(getattr(environment, "reset", None)) or not callable(getattr(environment, "step", None)):
            raise TypeError(f"environment needs reset() and step(), as gymnasium.Env has; got {environment!r}")
        if not callable(parse_action):
            raise TypeError(f"parse_action must be a function of a text, got {parse_action!r}")
        check_number("invalid_reward", invalid_reward)
        self.environment = environment
        self.parse_action = parse_action
        self.show = show
        self.role = role
        self.invalid_reward = invalid_reward
        self.options = options
        self.first = first

    def reset(self, prompt: Prompt) -> Observation | None:
        """Begin an episode, with the prompt's column ``seed``, or its row in the data, as the seed."""
        seed = prompt.metadata.get("seed", prompt.index)
        options = None if self.options is None else self.options(prompt)
        observation, _ = self.environment.reset(seed=int(seed), options=options)
        return self._shown(observation) if self.first is None else self.first(prompt, observation)

    def step(self, action: Action) -> Step:
        """Take the action that the text means."""
        try:
            meant = self.parse_action(action.text)
        except ValueError as error:
            told = self._said(f"Invalid action: {error}")
            return Step(told, reward=self.invalid_reward, info={"invalid_action": True})
        observation, reward, terminated, truncated, facts = self.environment.step(meant)
        answer = self._said(self._shown(observation))
        plain = {name: value for name, value in facts.items() if isinstance(value, str | int | float | bool)}
        done = bool(terminated) or bool(truncated)
        return Step(answer, reward=float(reward), done=done, info=plain | {"time_is_up": bool(truncated)})

    def close(self) -> None:
        """Close the environment."""
        close = getattr(self.environment, "close", None)
        if close is not None and not inspect.iscoroutinefunction(close):
            close()

    def _said(self, shown: Observation) -> Observation:
        """Make a message of text."""
        if self.role is None or not isinstance(shown, str):
            return shown
        message: Message = {"role": self.role, "content": shown}
        return [message]

    def _shown(self, observation: Any) -> Observation:
        return str(observation) if self.show is None else self.show(observation)
