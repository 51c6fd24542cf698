"""Sources and parts of the rollout side: what wraps what, and that a plain run enters no file of a feature."""

import dataclasses
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from rl_runs import digits, setup_run, weights

import rlhfkit
from rlhfkit import DynamicSampling, ReplayBuffer, RolloutCallback, SamplingSpec
from rlhfkit.callbacks.rollout.parts.oversampling import Oversampling
from rlhfkit.callbacks.rollout.sharing import SharedIteration
from rlhfkit.callbacks.rollout.source import Ask, RolloutPart, Source
from rlhfkit.rollout.collector import CollectedGroups

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)
PACKAGE = Path(rlhfkit.__file__).parent
FEATURES = (
    *(str(path.relative_to(PACKAGE)) for path in PACKAGE.glob("callbacks/rollout/parts/*.py")),
    *("rollout/groups.py", "rollout/request_batcher.py", "rollout/event_loop.py", "rollout/reference_samples.py"),
    *("rollout/background.py", "rollout/prompt_stream.py", "rollout/dynamic_sampling.py", "rollout/replay_buffer.py"),
    "rollout/partial_rollouts.py",
)
SELECTION = {"callbacks/rollout/parts/dynamic_sampling.py", "rollout/dynamic_sampling.py"}


def entered(folder: Path, **arguments: Any) -> set[str]:
    """Files of features of which a run calls a function between the start and the end of its fit."""
    trainer, module, data, _ = setup_run(folder, rollouts=RolloutCallback(digits, sampling=SAMPLING, **arguments))
    found: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        found.add(frame.f_code.co_filename)

    class Trace(L.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            sys.setprofile(note)
            threading.setprofile(note)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    trainer.callbacks.append(Trace())
    trainer.fit(module, data)
    return {name for name in FEATURES if str(PACKAGE / name) in found}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, set()),
        ({"dynamic_sampling": DynamicSampling()}, SELECTION),
        ({"parts": [Oversampling(0.5)]}, {"callbacks/rollout/parts/oversampling.py"}),
        ({"replay_buffer": ReplayBuffer()}, {"callbacks/rollout/parts/replay.py", "rollout/replay_buffer.py"}),
        (
            {"max_staleness": 1},
            {"callbacks/rollout/parts/ahead.py", "rollout/background.py"},
        ),
    ],
    ids=["plain", "dynamic sampling", "oversampling", "replay", "ahead"],
)
def test_a_run_enters_the_files_of_its_features_only(tmp_path: Path, arguments: Any, expected: set[str]) -> None:
    found = entered(tmp_path, **arguments)
    # Replay compares groups by the functions of dynamic sampling.
    assert found - ({"rollout/dynamic_sampling.py"} if "replay_buffer" in arguments else set()) == expected


class Backwards(RolloutPart):
    """Turns the order of each iteration around, and counts its iterations over stops."""

    name = "backwards"

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[list[int]] = []
        self.calls: list[str] = []

    def attach(self, rollouts: RolloutCallback) -> None:
        self.rollouts = rollouts

    def wrap(self, source: Source) -> Source:
        self.source = source
        return self

    def collect(self, ask: Ask) -> CollectedGroups:
        collected = self.source.collect(ask)
        self.calls.append("collect")
        return dataclasses.replace(collected, prompts=collected.prompts[::-1], groups=collected.groups[::-1])

    def metrics(self, shared: SharedIteration, version: int) -> dict[str, float]:
        self.seen.append(list(dict.fromkeys(shared.summary.group.tolist())))
        return {"rollout/backwards": float(self.count)}

    def end_iteration(self, next_iteration: int) -> None:
        self.count += 1
        self.calls.append("end")

    def logged(self, trainer: L.Trainer, iteration: int) -> None:
        self.calls.append("logged")

    def state_dict(self, next_iteration: int) -> list[int]:
        return [self.count]

    def load_state_dict(self, own: Iterable[int], states: Iterable[int], *, rank: int, world_size: int) -> None:
        (self.count,) = own


def test_a_part_of_ones_own_wraps_the_source_measures_and_is_resumed(tmp_path: Path) -> None:
    def run(part: Backwards | None, **more: Any) -> Any:
        rollouts = RolloutCallback(digits, sampling=SAMPLING, parts=[] if part is None else [part])
        trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, max_epochs=3)
        trainer.fit(module, data, **more)
        trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")
        return trainer, weights(module)

    part = Backwards()
    trainer, _ = run(part)
    assert part.rollouts is trainer.callbacks[0]
    assert part.calls == ["collect", "end", "logged"] * 3
    assert float(trainer.callback_metrics["rollout/backwards"]) == 2.0
    plain = RolloutCallback(digits, sampling=SAMPLING)
    trainer, module, data, _ = setup_run(tmp_path, rollouts=plain, max_epochs=1)
    trainer.fit(module, data)
    assert part.seen[0] == list(dict.fromkeys(sample.prompt.index for sample in plain.samples))[::-1]
    again = Backwards()
    run(again, ckpt_path=str(tmp_path / "3.ckpt"))
    assert again.count == 3
    with pytest.raises(TypeError, match="parts must be"):
        RolloutCallback(digits, parts=[len])  # type: ignore[list-item]
