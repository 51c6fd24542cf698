"""The contract of engines: what one has to define, and the arguments of its methods."""

import inspect
from typing import Any

import pytest

from rlhfkit.data.types import Sample
from rlhfkit.rollout import LocalEngine, ReplayEngine, RolloutEngine, SamplingSpec, VLLMPool


def test_an_engine_that_forgets_a_method_cannot_be_made() -> None:
    class Half(RolloutEngine):
        def generate(self, prompts: Any, sampling: SamplingSpec, *, iteration: int) -> list[Sample]:
            return []

    with pytest.raises(TypeError, match=r"abstract methods.* load, score, start"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize(
    "method", ["start", "generate", "score", "scores", "load", "sync_metrics", "sleep", "wake", "close"]
)
def test_engines_take_the_arguments_of_the_protocol(method: str) -> None:
    expected = inspect.signature(getattr(RolloutEngine, method))
    for kind in (LocalEngine, VLLMPool, ReplayEngine):
        assert inspect.signature(getattr(kind, method)) == expected, kind
