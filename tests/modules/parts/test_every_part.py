"""Every part: its formula, the same numbers on one rank and two, a resumed run, and plain values.

Covers ``modules/parts/``.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rl_runs import RANK
from strategies import ranks
from torch import Tensor

from modules.on_policy.test_base import experience
from rlhfkit import Experience, GRPOModule, local_rows
from rlhfkit.modules.parts.advantages import OverriddenAdvantages
from rlhfkit.parts import Part

from . import credit_cases, policy_cases, reward_cases, token_cases
from .cases import CASES, Case, Steps, all_parts, fit, make_model, numbers

FILES = (credit_cases, policy_cases, reward_cases, token_cases)
"""Each has added its parts to the cases."""

every_part = pytest.mark.parametrize("name", CASES)

IN_LATER_ITERATIONS = {"CriticWarmup", "KLInReward", "KLPenalty", "MovingReference", "Reference"}
"""Parts that have nothing to do in the first, where the policy waits, or is its own reference."""


def brief(name: str) -> Case:
    """A case that is run for one iteration, if its part has no state: it does in each what it does in the first."""
    case = CASES[name]
    if name in IN_LATER_ITERATIONS or type(case.make()).state_dict is not Part.state_dict:
        return case
    return replace(case, trainer={"max_epochs": 1} | case.trainer)


def on_ranks(folder: Path, world: int, data: str) -> dict[str, Any]:
    """What a rank runs: every case."""
    found = {}
    home = Path(data) / f"rank{RANK} of {world}"  # ranks must not write the same files
    # Models are made before ranks know of one another: then Transformers saves them on rank 0 only.
    credit_cases.teacher_folder()
    reward_cases.reward_folder()
    for model in {case.model for case in CASES.values() if case.model is not None}:
        make_model(home, model)
    for name in CASES:
        strategy = "ddp" if world > 1 else "auto"
        arguments = {"strategy": strategy, "devices": world, "use_distributed_sampler": False}
        found[name] = numbers(*fit(home, brief(name), **arguments))
    return found


def test_every_part_is_in_the_registry() -> None:
    """Others have tests of their own: noise is different on every rank, a router's loss in every micro-batch."""
    of_data = {"NEFTune", "RouterLoss", "TokenMetrics", "PrecomputedReference", "PrecomputedTeacher"}
    assert set(all_parts()) == set(CASES) | of_data | {"OverriddenAdvantages", "RemoteCritic"}
    on_policy = Path(__file__).parents[1] / "on_policy"
    assert all((on_policy / case.formula).exists() for case in CASES.values() if isinstance(case.formula, str))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if callable(case.formula)])
def test_formula(name: str, tmp_path: Path) -> None:
    CASES[name].formula(tmp_path)  # type: ignore[operator]


@every_part
def test_a_resumed_run_is_the_straight_one(name: str, tmp_path: Path) -> None:
    case, saved = CASES[name], tmp_path / "saved.ckpt"
    if not case.trainer:  # an update is one micro-batch
        case = replace(case, data={"micro_batch_size": 16} | case.data, trainer={"accumulate_grad_batches": 1})

    def save(trainer: object, pl_module: object) -> None:
        if trainer.global_step == 3 and not saved.exists():  # type: ignore[attr-defined]
            trainer.save_checkpoint(saved)  # type: ignore[attr-defined]

    trainer, straight = fit(tmp_path, case, callbacks=[Steps(save)])
    again, resumed = fit(tmp_path, case, ckpt=saved)
    assert trainer.global_step == again.global_step == 4
    assert [part.state_dict() for part in resumed.parts] == [part.state_dict() for part in straight.parts]
    for key, value in straight.policy.state_dict().items():
        assert torch.equal(value, resumed.policy.state_dict()[key]), key
    assert {*case.metrics} <= {*trainer.callback_metrics}
    loaded = case.kind.load_from_checkpoint(saved)
    assert [part.plain() for part in loaded.parts] == [part.plain() for part in straight.parts]
    state = torch.load(saved, weights_only=True)
    for part in loaded.parts:
        assert plain_state(part.state_dict()) == plain_state(state["callbacks"].get(part.state_key, {}))
    children = {key.partition(".")[0] for key in state["state_dict"]}  # frozen models are loaded by name
    assert children == {"policy", "critic"} & dict(straight.named_children()).keys()


def plain_state(state: Any) -> Any:
    """Without tensors, whose comparison has many values."""
    if isinstance(state, dict):
        return {name: plain_state(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, Tensor) else state


class Doubled(GRPOModule):
    """Overrides advantages, for which it makes a part that calls it."""

    @local_rows
    def advantages(self, experience: Experience) -> Tensor:
        return 2.0 * super().advantages(experience)


def test_an_overridden_method_takes_the_place_of_the_parts_that_it_may_call() -> None:
    rows, module = experience(), Doubled("no/model")
    found = [part for part in module.order if "advantages" in part.writes]
    assert [type(part) for part in found] == [OverriddenAdvantages]
    plain = GRPOModule("no/model").credit[0].prepare(rows).advantages
    doubled = found[0].prepare(rows).advantages
    assert torch.equal(doubled, 2.0 * plain)


@pytest.mark.distributed
def test_two_ranks_have_the_numbers_of_one_and_not_those_of_a_run_without(tmp_path: Path) -> None:
    alone = on_ranks(tmp_path, 1, str(tmp_path))
    plain: dict[str, dict[str, float]] = {}
    for name in CASES:
        case = brief(name)
        around = repr(replace(case, make=Part, formula=print, metrics=(), of_rows=(), always=False, text=None))
        if around not in plain:
            plain[around] = numbers(*fit(tmp_path, case, parts=[]))
        if case.always:
            assert alone[name] == plain[around]
        else:
            assert any(alone[name][key] != value for key, value in plain[around].items()), name
    both = ranks.run("modules.parts.test_every_part:on_ranks", 2, tmp_path, data=str(tmp_path), world=2)
    for name, values in alone.items():
        near = {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in values.items()}
        near |= {key: pytest.approx(values[key], rel=0.01) for key in CASES[name].of_rows}
        for found in both:
            assert found[name] == near, name
