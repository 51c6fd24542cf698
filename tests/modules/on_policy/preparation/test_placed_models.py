"""Models elsewhere are asked group by group, here one of a user's own in this process; test_model_pool.py has pools.

Covers ``modules/parts/reward_model.py`` too.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import PlainGRPO, ahead, digits, fit_run, weights
from tiny_models import local_engine, tiny_model
from torch import Tensor

import rlhfkit.distributed as distributed
from rlhfkit import (
    DynamicSampling,
    Experience,
    LocalEngine,
    Prompt,
    RolloutCallback,
    Sample,
    SamplingSpec,
)
from rlhfkit.models import load_causal_lm, policy_output
from rlhfkit.models.distillation import likeliest_tokens
from rlhfkit.modules.parts import Reference
from rlhfkit.modules.parts.teacher import DivergenceLoss
from rlhfkit.rewards import PairwiseReward
from rlhfkit.roles.frozen_model import EarlyRows
from rlhfkit.rollout import GroupSampler

from ..test_distillation import PlainDistillation
from ..test_online_dpo import PlainOnlineDPO


class Here:
    """A frozen model elsewhere that is here; it counts how often it was asked, and what it was asked for."""

    def __init__(self, model: str) -> None:
        self.model, self.waited, self.hidden = model, 0.0, 0.0
        self.early, self.sizes, self.started, self.top = EarlyRows(), list[int](), False, 0
        self.closed = 0

    def plain(self) -> dict[str, Any]:
        return {"model": self.model, "urls": "http://nobody"}

    def start(self, role: str, **_: Any) -> None:
        if not self.started:
            self.started, self._model = True, load_causal_lm(self.model).eval()

    def take_seconds(self) -> tuple[float, float]:
        return 1.0, 2.0

    def refresh(self) -> None: ...

    def close(self) -> None:
        self.closed += 1

    def submit(self, experience: Experience, batches: Sequence[Tensor]) -> "Here.Done":
        self.sizes.append(sum(map(len, batches)))
        mask, temperature = experience.action_mask, experience.temperature
        if self.top:
            return self.Done(likeliest_tokens(self._model, experience, mask, self.top, temperature, chunk_size=5))
        with torch.no_grad():
            return self.Done(policy_output(self._model, experience, mask, temperature=temperature).logprobs)

    class Done:
        def __init__(self, values: Tensor) -> None:
            self._values = values

        def result(self, columns: int | None = None) -> Tensor:
            return self._values


def run_with_child_and_elsewhere(
    folder: Path, role: str, rollouts: Callable[[], RolloutCallback], arguments: Mapping[str, Any] = {}, **run: Any
) -> tuple[L.Trainer, Here]:
    """Train with the ``reference`` or ``teacher`` as a child, and then elsewhere, to the same weights; the latter."""
    for seed, name in enumerate(("model", "teacher", "other")):
        tiny_model(folder / name, seed=seed)
    teacher, found = str(folder / "teacher"), []
    elsewhere = Here(teacher if role == "teacher" else str(folder / "model"))
    for placed in (None, elsewhere):
        model = {"teacher": placed or teacher} if role == "teacher" else {"parts": [Reference(placed)]}
        given = {"lr": 0.05, **arguments, **model}
        trainer, module, _ = fit_run(folder, module_arguments=given, rollouts=rollouts(), **run)
        found.append(weights(module))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-6)
    return trainer, elsewhere


def streaming(max_staleness: int = 0, temperature: float = 1.0) -> RolloutCallback:
    """Groups are finished one by one, as those that are chosen have to be known."""
    chosen = DynamicSampling(by=lambda sample: float(sum(sample.token_ids.tolist())))
    sampling = SamplingSpec(group_size=4, max_new_tokens=8, temperature=temperature)
    return RolloutCallback(digits, sampling=sampling, parts=ahead(max_staleness, chosen))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_each_group_is_asked_about_when_it_is_finished_and_the_numbers_are_the_childs(
    tmp_path: Path, max_staleness: int
) -> None:
    trainer, elsewhere = run_with_child_and_elsewhere(
        tmp_path, "reference", partial(streaming, max_staleness), {"kl_coef": 0.1}, module=PlainGRPO
    )
    assert set(elsewhere.sizes) == {4}  # a group each time, and nothing was asked for again
    assert len(elsewhere.sizes) >= 2 * 8
    assert float(trainer.callback_metrics["time/reference_waited"]) == 1.0
    assert float(trainer.callback_metrics["time/reference_hidden"]) == 2.0


@pytest.mark.parametrize(
    "knobs",
    [{}, {"parts": [DivergenceLoss("jsd", top_k=8, remainder="renormalize").plain()]}],
    ids=["token", "likeliest"],
)
def test_a_teacher_elsewhere_gives_the_numbers_of_the_child(tmp_path: Path, knobs: dict[str, Any]) -> None:
    _, elsewhere = run_with_child_and_elsewhere(
        tmp_path, "teacher", partial(streaming, temperature=0.7), knobs, module=PlainDistillation, max_epochs=1
    )
    assert set(elsewhere.sizes) == {4}


def first_token(pairs: Sequence[tuple[Sample, Sample]]) -> list[float | None]:
    """A judge without ties, as far as two first tokens differ."""
    return [0.5 + (first.token_ids.tolist()[0] - second.token_ids.tolist()[0]) / 256 for first, second in pairs]


def test_samples_of_another_model_are_asked_about_too(tmp_path: Path) -> None:
    """Their tokens have no version of the policy; the reference's log-probs of its own answers are in the loss."""
    others: list[LocalEngine] = []

    async def group(prompt: Prompt, size: int, sampler: GroupSampler) -> list[Sample]:
        return [*await sampler.sample(prompt, size - 1), *await sampler.sample(prompt, 1, engine=others[0])]

    def rollouts() -> RolloutCallback:
        others[:] = [local_engine(tmp_path / "other")]
        sampling = SamplingSpec(group_size=2, max_new_tokens=6)
        return RolloutCallback(PairwiseReward(first_token), group=group, sampling=sampling)

    _, elsewhere = run_with_child_and_elsewhere(
        tmp_path, "reference", rollouts, {"beta": 0.4}, module=PlainOnlineDPO, max_epochs=1
    )
    assert sum(elsewhere.sizes) == 2 * 8  # all of them early


def broken(samples: Sequence[Sample]) -> list[float]:
    raise OSError("no disk")


def test_an_error_ends_the_models_elsewhere(tmp_path: Path) -> None:
    elsewhere = Here(str(tiny_model(tmp_path / "model")))
    arguments = {"kl_coef": 0.1, "parts": [Reference(elsewhere)]}
    with pytest.raises(OSError, match="no disk"):
        fit_run(tmp_path, module_arguments=arguments, rollouts=RolloutCallback(broken, sampling=streaming().sampling))
    assert elsewhere.closed == 1  # Lightning calls no teardown of the module then


def test_whatever_fails_while_one_rank_waits_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Exception | None] = []
    monkeypatch.setattr(distributed, "exchange_errors", lambda error, **_: told.append(error) or error)
    with pytest.raises(OSError, match="no disk"):
        distributed.run_on_each_rank(partial(broken, []))
    assert [type(one) for one in told] == [OSError]
