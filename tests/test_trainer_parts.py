"""Parts of a run that do not fit one another are named; those that do are found."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfkit import PromptDataModule, RolloutCallback
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


def test_parts_that_fit_are_found() -> None:
    data, rollouts = PromptDataModule([{"prompt": "a"}]), RolloutCallback()
    assert prompts_of(trainer(datamodule=data)) is data
    assert experience_source_of(trainer(callbacks=[object(), rollouts])) is rollouts
