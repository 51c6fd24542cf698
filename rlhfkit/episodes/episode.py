"""``Episode``: one conversation between policy and environment, and the limits that can end it."""

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from rlhfkit.data.types import FinishReason, Prompt, Sample
from rlhfkit.episodes.environment import Action, Environment, Observation, Step
from rlhfkit.episodes.observations import ObservationTokenizer, is_conversation
from rlhfkit.episodes.trajectory import Trajectory
from rlhfkit.rollout.event_loop import call_with_timeout
from rlhfkit.rollout.groups import GroupSampler
from rlhfkit.rollout.request_batcher import EngineFailedError, request_index

EndReason = Literal["done", "turns", "tokens", "time", "error"]
"""Why an episode ended; the table in :class:`~rlhfkit.episodes.Episodes` explains each."""

FINISH_REASONS: dict[EndReason, FinishReason] = {
    "done": "stop",
    "turns": "length",
    "tokens": "length",
    "time": "abort",
    "error": "abort",
}
"""``Sample.finish_reason`` for each way an episode can end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_turns: int
    max_tokens: int
    """Prompt, actions and observations together."""
    timeout: float
    """Seconds of the whole episode, generation included."""
    call_timeout: float
    """Seconds of each call of the environment."""


class Episode:
    """One episode, with the given index in a prompt's group."""

    def __init__(
        self,
        prompt: Prompt,
        sample_index: int,
        *,
        environment: Callable[[], Environment],
        sampler: GroupSampler,
        observations: ObservationTokenizer,
        limits: EpisodeLimits,
    ) -> None:
        self.prompt = prompt
        self.sample_index = sample_index
        self.make_environment = environment
        self.sampler = sampler
        self.observations = observations
        self.limits = limits
        self.sampling = dataclasses.replace(sampler.sampling, group_size=1)
        self.error: Exception | None = None
        """The exception that ended the episode early."""
        self._trajectory = Trajectory(prompt, sample_index)
        self._environment: Environment | None = None
        self._arguments: dict[str, Any] = {}  # of the chat template, for the row of the prompt
        self._steps: list[dict[str, Any]] = []
        self._scored = True  # no reward was None
        self._environment_seconds = 0.0

    async def run(self) -> Sample:
        """Run the episode to its end and return the sample; raises :class:`EngineFailedError` if the engine failed.

        Its ``info`` has ``reward`` (``None`` after an error or timeout), ``ended`` (:data:`EndReason`), ``turns``,
        ``failed``, ``environment_tokens``, ``environment_seconds``, ``last_text``, ``steps``, and after an error
        ``error``.
        """
        self._deadline = time.monotonic() + self.limits.timeout
        ended: EndReason = "error"
        try:
            ended = await self._turns()
        except EngineFailedError:
            raise
        except TimeoutError as error:
            ended, self.error = "time", error
        except Exception as error:  # raised by the environment, or because of what it returned
            self.error = error
        finally:
            await self._close()
        return self._sample(ended)

    async def _turns(self) -> EndReason:
        self._arguments = self.observations.row_arguments(self.prompt)
        self._environment = environment = await self._call_environment(self.make_environment, "making the environment")
        self._apply_reset(await self._call_environment(environment.reset, "reset()", self.prompt))
        for turn in range(self.limits.max_turns):
            room = self.limits.max_tokens - len(self._trajectory.context)
            if room < 1:
                return "tokens"
            action = await self._sample_action(turn, room)
            step = await self._call_environment(environment.step, "step()", action)
            if not isinstance(step, Step):
                raise TypeError(f"step() must return a Step, got {type(step).__name__}")
            self._record_reward(step)
            if step.done:
                return "done"
            if turn + 1 < self.limits.max_turns and not self._append_observation(step.observation):
                return "tokens"
        return "turns"

    def _apply_reset(self, observation: Observation | None) -> None:
        """Start the trajectory with the observation of ``reset()``."""
        if observation is None:
            return
        if is_conversation(observation):
            token_ids = self.observations.encode_conversation(observation, **self._arguments)  # type: ignore[arg-type]  # checked
            self._trajectory.prompt = dataclasses.replace(self.prompt, token_ids=token_ids, attachments=())
        else:
            self._trajectory.add_observation(self.observations.encode_observation(observation), self.sampler.version)

    async def _sample_action(self, turn: int, room: int) -> Action:
        """Sample one turn of the policy, of at most ``room`` tokens."""
        spec = self.sampling
        most = min(spec.max_new_tokens, room)
        if most < spec.max_new_tokens:
            spec = dataclasses.replace(spec, max_new_tokens=most, min_new_tokens=min(spec.min_new_tokens, most))
        index = request_index(self.prompt.index, self.sample_index, turn)
        request = Prompt(index, self._trajectory.context, attachments=self._trajectory.prompt.attachments)
        (sampled,) = await call_with_timeout(
            partial(self.sampler.ask, request, spec),
            timeout=self._seconds_left(),
            description=f"the episode (limit: {self.limits.timeout:g} s), generating in turn {turn},",
        )
        self._trajectory.add_action(sampled)
        tokenizer = self.observations.tokenizer
        text = tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        raw_text = tokenizer.decode(sampled.token_ids, skip_special_tokens=False)
        return Action(turn, sampled.token_ids.tolist(), text, raw_text, sampled.finish_reason)

    def _record_reward(self, step: Step) -> None:
        self._steps.append(dict(step.info))
        if step.reward is None:
            self._scored = False
        else:
            self._trajectory.add_reward(float(step.reward))

    def _append_observation(self, observation: Observation | None) -> bool:
        """Append the observation of ``step()``; return false if that would leave no room for another turn."""
        if observation is None:
            raise ValueError(
                "step() returned neither an observation nor done=True: return one of them (an observation may be "
                "an empty text)"
            )
        last = self._trajectory.last_action
        token_ids = self.observations.encode_observation(observation, last, **self._arguments)
        if len(self._trajectory.context) + len(token_ids) >= self.limits.max_tokens:
            return False
        versions = self._trajectory.versions
        self._trajectory.add_observation(token_ids, versions[-1] if versions else 0)
        return True

    async def _call_environment(self, function: Callable[..., Any], name: str, *arguments: Any) -> Any:
        """Call the environment with its time limit."""
        began = time.monotonic()
        left = self._seconds_left()
        limit = min(self.limits.call_timeout, left)
        which = f"{name} of the environment" if limit < left else f"the episode (limit: {self.limits.timeout:g} s)"
        try:
            return await call_with_timeout(function, *arguments, timeout=limit, description=which)
        finally:
            self._environment_seconds += time.monotonic() - began

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    async def _close(self) -> None:
        """Close the environment; a failure is only noted, since the sample is complete."""
        environment, self._environment = self._environment, None
        if environment is None or (
            isinstance(environment, Environment) and type(environment).close is Environment.close
        ):
            return
        try:
            await call_with_timeout(
                environment.close, timeout=self.limits.call_timeout, description="close() of the environment"
            )
        except Exception as error:
            self.error = self.error or error

    def _sample(self, ended: EndReason) -> Sample:
        trajectory = self._trajectory
        finish = FINISH_REASONS[ended]
        if ended == "done" and trajectory.last_action is not None and trajectory.last_action.finish_reason == "length":
            finish = "length"  # the last turn was truncated
        whole = self._scored and trajectory.turns > 0 and ended not in ("time", "error")
        last = trajectory.last_action.token_ids if trajectory.last_action is not None else []
        sample = trajectory.sample(finish, {})
        sample.info |= {
            "reward": sum(trajectory.rewards.values()) if whole else None,
            "ended": ended,
            "turns": trajectory.turns,
            "failed": ended in ("time", "error"),
            "environment_tokens": len(trajectory.token_ids) - trajectory.num_action_tokens,
            "environment_seconds": self._environment_seconds,
            "last_text": self.observations.tokenizer.decode(last, skip_special_tokens=True),
            "steps": self._steps,
        }
        if self.error is not None:
            sample.info["error"] = f"{type(self.error).__name__}: {self.error}"
        return sample
