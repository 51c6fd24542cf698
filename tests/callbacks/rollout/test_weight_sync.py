"""The probe after a weight sync in 16 bits: on sampled tokens, by their mean, a warning before the error."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rl_runs import digits, setup_run

from rlhfkit import LocalEngine, RolloutCallback, Sample, SamplingSpec


class Shifted(LocalEngine):
    """Scores as if its weights were a little different, more after each sync; notes what it is asked."""

    def __init__(self, *shifts: float) -> None:
        super().__init__()
        self.shifts = shifts
        self.asked: list[list[int]] = []

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.asked += map(list, sequences)
        shift = self.shifts[len(self.asked) - 1]
        return [[logprob + shift for logprob in row] for row in super().score(sequences)]


class Samples(RolloutCallback):
    """Keeps the first sample of each iteration."""

    def remembered(self) -> list[list[int]]:
        return self.kept

    def share(self, collected):  # type: ignore[no-untyped-def]
        shared = super().share(collected)
        first: Sample = shared.samples[0]
        self.kept = [*getattr(self, "kept", []), [*first.prompt.token_ids.tolist(), *first.token_ids.tolist()]]
        return shared


def test_a_small_mean_difference_is_fine_a_larger_one_warned_of_and_a_large_one_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Shifted(0.0, 0.2, 0.5)
    sampling = SamplingSpec(group_size=4, max_new_tokens=40, min_new_tokens=40)
    rollouts = Samples(digits, engine=engine, sampling=sampling)
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts, precision="bf16-true", max_epochs=3)
    caplog.set_level(logging.WARNING, logger="rlhfkit.callbacks.rollout.parts.probe")
    with pytest.raises(RuntimeError, match=r"differ from the trainer's by 0\.\d+ on average over 40 tokens, more than"):
        trainer.fit(module, data)
    warned = [record.message for record in caplog.records if "on average over 40 tokens" in record.message]
    assert len(warned) == 1
    assert engine.version is None
    random, *sampled = engine.asked
    assert len(random) == 32
    assert sampled == rollouts.remembered()


def test_an_engine_whose_log_probs_are_not_numbers_is_an_error(tmp_path: Path) -> None:
    engine = Shifted(math.nan)
    rollouts = RolloutCallback(digits, engine=engine, sampling=SamplingSpec(group_size=4, max_new_tokens=4))
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts)
    with pytest.raises(RuntimeError, match="differ from the trainer's by nan, more than"):
        trainer.fit(module, data)
    assert engine.version is None


class Several(Shifted):
    """Three engines, of which one has other weights."""

    def scores(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        right = LocalEngine.score(self, sequences)
        return {
            "engine 0": right,
            "engine 1": [[one + self.shifts[0] for one in row] for row in right],
            "engine 2": right,
        }


@pytest.mark.parametrize("shift", [-0.5, math.nan])
def test_one_of_several_engines_with_other_weights_is_named(tmp_path: Path, shift: float) -> None:
    rollouts = RolloutCallback(digits, engine=Several(shift), sampling=SamplingSpec(group_size=4, max_new_tokens=4))
    trainer, module, data, _ = setup_run(tmp_path, rollouts=rollouts)
    with pytest.raises(RuntimeError, match=r"engine 1's log-probs differ from the trainer's by (0\.5|nan), more than"):
        trainer.fit(module, data)
    assert rollouts.engine.version is None
