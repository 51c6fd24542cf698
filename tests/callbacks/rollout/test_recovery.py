"""Engines that lose their weights get the current ones again, and the run continues with the same samples.

On several ranks: ``test_sharing.py``.
"""

from pathlib import Path
from typing import Any

import pytest
from rl_runs import Iterations, PlainGRPO, additions, digits, fit_run

from rlhfkit import Ahead, DynamicSampling, Episodes, LocalEngine, RolloutCallback, SamplingSpec
from rlhfkit.episodes import Action, Environment, Step
from rlhfkit.rollout.errors import EngineError, WeightsNeededError

SPEC = SamplingSpec(group_size=4, max_new_tokens=6)


class Forgetful(LocalEngine):
    """Loses its weights, as two engines do that die one after the other, at the given calls; then waits for a load."""

    shared = True

    def __init__(self, *loses_at: int) -> None:
        super().__init__()
        self.loses_at = loses_at
        self.calls, self.loads = 0, 0
        self.lost = False

    def stream(self, sampling: SamplingSpec, *, iteration: int) -> Any:
        self.calls += 1
        if self.calls in self.loses_at:
            self.lost = True
        if self.lost:
            raise WeightsNeededError("no vLLM engine serves")
        return super().stream(sampling, iteration=iteration)

    def load(self, weights: Any, version: int) -> None:
        super().load(weights, version)
        self.loads, self.lost = self.loads + 1, False


class Once(Environment):
    """One turn, paid by its digits."""

    def step(self, action: Action) -> Step:
        return Step(reward=sum(letter.isdigit() for letter in action.text) / 8, done=True)


def run(folder: Path, engine: Any, *, group: Any = None, validate: bool = False, **options: Any) -> Iterations:
    """Three iterations."""
    seen = Iterations()
    fit_run(
        folder,
        module=PlainGRPO,
        rollouts=RolloutCallback(digits, engine=engine, group=group, sampling=SPEC, **options),
        callbacks=[seen],
        data_arguments={"validation_data": additions(4)} if validate else None,
        max_epochs=3,
    )
    return seen


@pytest.mark.parametrize("case", ["validation", "dynamic sampling", "episodes"])
def test_a_run_that_takes_turns_is_bitwise_the_undisturbed_one(tmp_path: Path, case: str) -> None:
    options: dict[str, Any] = {"validate": case == "validation"}
    if case == "dynamic sampling":
        options["parts"] = [DynamicSampling()]
    calm, disturbed = Forgetful(), Forgetful(1, 3, 4)
    expected, found = (
        run(tmp_path, engine, group=Episodes(Once) if case == "episodes" else None, **options)
        for engine in (calm, disturbed)
    )
    assert (found.began, found.tokens, found.weights) == (expected.began, expected.tokens, expected.weights)
    losses = 1 if case == "episodes" else 3  # episodes that play side by side lose and get them together
    assert disturbed.loads >= calm.loads + losses
    assert disturbed.calls > calm.calls


@pytest.mark.parametrize(("loses_at", "in_flight"), [(2, False), (3, True)])
def test_sampling_ahead_begins_anew_with_the_same_prompts(tmp_path: Path, loses_at: int, in_flight: bool) -> None:
    options: dict[str, Any] = {"parts": [Ahead(1, in_flight=in_flight)]}
    seen = run(tmp_path, Forgetful(), **options)
    engine = Forgetful(loses_at)
    again = run(tmp_path, engine, **options)
    assert again.prompts == seen.prompts
    assert not engine.lost
    assert all(min(sample.versions.tolist()) >= 2 for sample in again.samples[-1])  # one iteration older at most


def test_an_error_without_hope_ends_the_run_and_frees_the_engine(tmp_path: Path) -> None:
    class Hopeless(Forgetful):
        def stream(self, sampling: SamplingSpec, *, iteration: int) -> Any:
            raise EngineError("all are dead for good")

    engine = Hopeless()
    with pytest.raises(EngineError, match="dead for good"):
        run(tmp_path, engine)
    assert engine.loads == 1
    assert engine.version is None
