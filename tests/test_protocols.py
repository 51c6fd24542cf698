"""rlhfkit's classes have what the protocols ask for, with the same arguments; what is missing is named."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import get_protocol_members

from rlhfkit import (
    GRPOModule,
    OnlineDPOModule,
    PromptDataModule,
    RLHFDeepSpeedStrategy,
    RolloutCallback,
    SFTDataModule,
    SFTModule,
    protocols,
)
from rlhfkit.datamodules.prompts.cursor import IterationQueue
from rlhfkit.datamodules.tokenization.mixture import MixedExamples
from rlhfkit.modules.on_policy.placed_models import PlacedModels
from rlhfkit.modules.optimizers import Muon
from rlhfkit.modules.parts import RewardModel
from rlhfkit.modules.parts.advantages import AdvantagesBy
from rlhfkit.modules.parts.critic_elsewhere import RemoteCritic
from rlhfkit.modules.parts.pretraining_loss import PretrainingLoss
from rlhfkit.rollout.prompt_stream import PromptStream
from rlhfkit.trainer_parts import experience_source_of, learner_of, prompts_of


class ChoosesEngines(OnlineDPOModule):
    """As those of tutorials/research, which need answers of two samplers."""

    def check_engine(self, engine: Any) -> None:
        """Take any."""


CASES = [
    (protocols.GenerativeModule, SFTModule),
    (protocols.ExperienceLearner, GRPOModule),
    (protocols.CorrectsOffPolicy, GRPOModule),
    (protocols.ScoresRows, RewardModel),
    (protocols.HasTokenizer, SFTModule),
    (protocols.TakesTokenizer, SFTModule),
    (protocols.HasChatTemplate, PromptDataModule),
    (protocols.HasModelLimits, SFTModule),
    (protocols.SavesPretrained, SFTModule),
    (protocols.ChecksRows, SFTModule),
    (protocols.DrawnPrompts, PromptStream),
    (protocols.PromptQueue, IterationQueue),
    (protocols.PromptSource, PromptDataModule),
    (protocols.ChecksPrompts, PromptDataModule),
    (protocols.ChecksColumns, PromptDataModule),
    (protocols.SeesImages, SFTModule),
    (protocols.PretrainingSource, PromptDataModule),
    (protocols.LearnsFromText, PretrainingLoss),
    (protocols.ExperienceSource, RolloutCallback),
    (protocols.MixedDataset, MixedExamples),
    (protocols.RLHFStrategy, RLHFDeepSpeedStrategy),
    (protocols.StartsRanksOnRay, RLHFDeepSpeedStrategy),
    (protocols.TakesFlatLayouts, Muon),
    (protocols.KeepsFolder, RemoteCritic),
    (protocols.RecordsWork, RemoteCritic),
    (protocols.AsksWhileSampling, GRPOModule),
    (protocols.ModelsElsewhere, PlacedModels),
    (protocols.UsesGreedyRewards, AdvantagesBy),
    (protocols.ComparesGroups, OnlineDPOModule),
    (protocols.ChecksEngine, ChoosesEngines),
    (protocols.HasPromptColumns, PromptDataModule),
    (protocols.DescribesData, SFTDataModule),
    (protocols.DescribesData, PromptDataModule),
]


def set_in_init(kind: type) -> set[str]:
    """Attributes that the constructors of a class and its bases assign or declare."""
    inits = [
        base.__init__ for base in kind.__mro__ if "__init__" in vars(base) and base.__module__.startswith("rlhfkit")
    ]
    assigned = {name for init in inits for name in init.__code__.co_names}
    return assigned | {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}


@pytest.mark.parametrize(("protocol", "kind"), CASES, ids=lambda case: case.__name__)
def test_classes_have_the_members_with_their_arguments(protocol: Any, kind: type) -> None:
    members = get_protocol_members(protocol)
    assert {name for name in members if not hasattr(kind, name)} <= set_in_init(kind)
    for name in members:
        asked = inspect.getattr_static(protocol, name, None)
        if inspect.isfunction(asked):
            arguments = inspect.signature(asked).parameters
            assert set(arguments) <= set(inspect.signature(getattr(kind, name)).parameters), name


def test_every_protocol_has_a_class_of_ours() -> None:
    everything = {kind for kind in vars(protocols).values() if getattr(kind, "_is_protocol", False)}
    assert everything - {protocols.Protocol} == {protocol for protocol, _ in CASES}


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
