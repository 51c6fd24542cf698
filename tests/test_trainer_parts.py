"""Parts of a run that do not fit one another are named; every run finds those that do."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfkit import RolloutCallback
from rlhfkit.trainer_parts import experience_source_of, learner_of, prompts_of


def trainer(**parts: Any) -> Any:
    return SimpleNamespace(**{"callbacks": [], "datamodule": None, "lightning_module": None} | parts)


def test_parts_that_do_not_fit_are_named() -> None:
    with pytest.raises(TypeError, match=r"takes its prompts from a DataModule with prompt_queue\(\)"):
        prompts_of(trainer(datamodule=object()))
    with pytest.raises(TypeError, match=r"object has no prepare\(\)"):
        learner_of(trainer(lightning_module=object()))
    with pytest.raises(ValueError, match=r"exactly one callback that collects experience.*found none"):
        experience_source_of(trainer())
    with pytest.raises(ValueError, match="found RolloutCallback, RolloutCallback"):
        experience_source_of(trainer(callbacks=[RolloutCallback(), RolloutCallback()]))
