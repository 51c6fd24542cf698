"""Engines are compared by their log-probs of the same tokens: agreement, a warning, an error that names them."""

import logging
import math

import pytest

from rlhfkit.rollout.errors import EngineError
from rlhfkit.rollout.probe_bounds import ProbeBounds, same_scores

MEAN = ProbeBounds("mean", warn=0.1, fail=0.3)


def test_the_first_engines_scores_are_returned_when_all_agree(caplog: pytest.LogCaptureFixture) -> None:
    scores = {3: [[-1.0, -2.0], [-0.5]], 5: [[-1.05, -2.0], [-0.5]]}
    assert same_scores(scores, MEAN) == [[-1.0, -2.0], [-0.5]]
    assert not caplog.records


def test_a_difference_between_the_bounds_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        same_scores({0: [[-1.0, -2.0]], 1: [[-1.4, -2.0]]}, MEAN)
    assert "engines 0 and 1 may compute differently" in caplog.text
    assert "0.2 on average" in caplog.text


@pytest.mark.parametrize("other", [-1.8, math.nan])
def test_other_weights_are_an_error_that_names_the_engines_and_the_setting(other: float) -> None:
    with pytest.raises(EngineError, match=r"engines 0 and 7 serve different weights.*VLLMPool\(probe_tolerance=0.3\)"):
        same_scores({0: [[-1.0, -2.0]], 7: [[other, -2.0]]}, MEAN, owner="VLLMPool")
