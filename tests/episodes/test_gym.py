"""Environments with Gymnasium's interface; ``test_episodes.py`` has a policy play."""

from typing import Any

from episodes.episode_cases import said
from rlhfkit import Prompt
from rlhfkit.episodes import GymEnvironment


class Corridor:
    """Walk to the right end of a corridor; gymnasium.Env's interface, without the package."""

    def __init__(self) -> None:
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.length = 2 + (seed or 0) % 3 + (options or {}).get("longer", 0)
        self.place, self.steps = 0, 0
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place, self.steps = max(0, self.place + action), self.steps + 1
        there = self.place >= self.length
        return self.place, float(there), there, self.steps >= 5, {"place": self.place, "self": self}

    def close(self) -> None:
        self.closed = True


def walk(text: str) -> int:
    return {"right": 1, "left": -1}[text] if text in ("right", "left") else int(text)


def test_an_episode_is_that_of_the_environment() -> None:
    environment = GymEnvironment(Corridor(), parse_action=walk, invalid_reward=-0.5)
    assert environment.reset(Prompt(3, [1])) == "0"
    step = environment.step(said("right"))
    assert (step.observation, step.reward, step.done) == ([{"role": "user", "content": "1"}], 0.0, False)
    assert step.info == {"place": 1, "time_is_up": False}
    wrong = environment.step(said("up"))
    assert wrong.reward == -0.5
    assert "Invalid action: invalid literal for int" in wrong.observation[0]["content"]  # type: ignore[index,call-overload]
    assert environment.step(said("right")).done
    environment.close()
    assert environment.environment.closed  # type: ignore[attr-defined]


def test_seed_options_and_what_is_read_first_come_from_the_prompt() -> None:
    environment = GymEnvironment(
        Corridor(),
        parse_action=walk,
        options=lambda prompt: {"longer": 10},
        first=lambda prompt, observation: [{"role": "user", "content": f"{prompt.text} {observation}"}],
        show=lambda observation: [observation],
        role=None,
    )
    prompt = Prompt(0, [1], text="Walk from", metadata={"seed": 5})
    assert environment.reset(prompt) == [{"role": "user", "content": "Walk from 0"}]
    assert environment.environment.length == 14  # type: ignore[attr-defined]
    assert environment.step(said("1")).observation == [1]
    ended = [environment.step(said("-1")) for _ in range(4)][-1]
    assert ended.done
    assert ended.info["time_is_up"]
