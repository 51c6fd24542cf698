"""Parts: their order, their names and plain values, and a module that was given some."""

import dataclasses
from pathlib import Path
from typing import Any

import jsonargparse
import lightning as L
import pytest
import torch
from rl_runs import fit_run, setup_run, weights
from tiny_models import tiny_model
from torch import Tensor

from rlhfkit import (
    DynamicSampling,
    Experience,
    GRPOModule,
    LossOutput,
    Part,
    PPOModule,
    Prepare,
    Stage,
    local_rows,
)
from rlhfkit.losses import aggregate, group_advantages
from rlhfkit.modules.parts import ClipRewards, EntropyBonus, KLInReward, KLPenalty, KLTarget, MaskTruncated
from rlhfkit.parts import arrange, make_part


def halve(rows: Experience) -> Experience:
    """A step of a user's own."""
    return dataclasses.replace(rows, rewards=rows.rewards / 2)


@local_rows
def halve_own(rows: Experience) -> Experience:
    """The same for this rank's rows."""
    return halve(rows)


def constant(step: int) -> float:
    """A weight of a user's own, which does not change."""
    return 0.3


def decays(step: int) -> float:
    """One that does."""
    return 0.3 / (1 + step)


def returns_nothing(rows: Experience) -> None:
    """What a user forgets."""


def drops_a_row(rows: Experience) -> Experience:
    """What a user should not do."""
    return rows.select(torch.arange(len(rows) - 1))


class Counter(Part):
    """State, arguments, and a share in everything that a part can take part in."""

    stage, reads, writes, outputs = Stage.CREDIT, ("advantages", "old_logprobs"), ("advantages",), ("entropy",)

    def __init__(self, scale: float = 2.0, *, factor: float = 0.5) -> None:
        self.scale, self.factor = scale, factor
        self.steps = self.iterations = 0
        self.seen: list[Any] = []

    def prepare(self, rows: Experience) -> Experience:
        self.iterations += 1
        assert rows.old_logprobs is not None
        assert rows.old_logprobs[rows.action_mask].ne(0).all()  # of all rows, the first update's too
        return dataclasses.replace(rows, advantages=self.scale * rows.advantages)

    def weigh(self, batch: Experience, out: Any, old: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.full_like(old, self.factor), {"mine/factor": torch.tensor(self.factor)}

    def term(self, batch: Experience, out: Any, old: Tensor) -> LossOutput:
        reduction = self.module.policy_loss.aggregation_arguments(batch)
        loss = aggregate(out.entropy, batch.action_mask, reduction["aggregation"], reduction["denominator"])
        return LossOutput(-0.1 * loss, {"mine/term": loss.detach()})

    def observe(self, batch: Experience, out: Any, old: Tensor) -> dict[str, Tensor]:
        self.seen.append(torch.equal(old, out.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs))
        return {"mine/rows": torch.tensor(float(len(batch)))}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "iterations": self.iterations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.iterations = state["steps"], state["iterations"]


class NotSaved(Part):
    def __init__(self, size: int) -> None:
        self._size = size


class Holds(Part):
    def __init__(self, thing: object) -> None:
        self.thing = thing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


# ---------------------------------------------------------------------- order


def writes(**more: Any) -> Part:
    return Prepare(halve_own, Stage.MODELS, writes=["scores"], **more)


def reads(stage: Stage = Stage.CREDIT) -> Part:
    return Prepare(halve, stage, reads=["scores"])


def test_parts_are_sorted_by_stage_keep_their_order_within_one_and_may_change_what_another_has_written() -> None:
    late, first, second = writes(), Prepare(halve), Prepare(halve_own)
    assert arrange([reads(), late, first, second])[:3] == [first, second, late]
    assert len(arrange([writes(), writes(reads=["scores"]), reads()])) == 3


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([reads()], r"halve \(CREDIT\) reads scores, which nothing before it writes: add the part .*: nothing"),
        ([reads(Stage.POLICY), writes()], "halve .POLICY.*: give it a later stage than halve_own"),
        ([writes(), writes()], "halve_own writes scores, which halve_own has written before it: leave one of them"),
        (
            [ClipRewards(2.0)],
            r"no effect: nothing after it reads the rewards that ClipRewards\(limit=2.0\) writes: .* a reward_coef",
        ),
    ],
)
def test_a_wrong_order_is_refused_with_the_way_out(parts: list[Part], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrange(parts)


# ---------------------------------------------------------------------- plain values


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (3, TypeError, "a part is a Part, a function of the rows, or their dotted name, got 3"),
        (DynamicSampling(), TypeError, r"^DynamicSampling\(\) is in the wrong place: .* to RolloutCallback"),
        ({"class": "Counter"}, ValueError, "a part is {class_path: ..., init_args: {...}}, got"),
        ({"class_path": "test_parts.Count"}, ValueError, "class_path='test_parts.Count' cannot be imported"),
        ("pathlib.Path", TypeError, "Path is no Part: derive it from rlhfkit.Part"),
        ({"class_path": "rlhfkit.Prepare", "init_args": {"function": halve, "stage": "EARLY"}}, ValueError, "SHAPE"),
    ],
)
def test_what_is_no_part_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_part(given)


@pytest.mark.parametrize(
    ("part", "message"), [(NotSaved(3), "keep size as attributes"), (Holds(object()), "Holds.thing is object")]
)
def test_what_cannot_be_saved_is_refused_when_the_module_is_made(model: str, part: Part, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        GRPOModule(model, parts=[part])


# ---------------------------------------------------------------------- in a module


def run(folder: Path, parts: Any, *, epochs: int = 2, ckpt: Path | None = None, **arguments: Any) -> Any:
    L.seed_everything(0, verbose=False)
    return fit_run(folder, module_arguments={"parts": parts} | arguments, max_epochs=epochs, resume=ckpt)


@pytest.mark.parametrize("step", [halve, halve_own])
def test_a_function_and_a_part_take_part_in_rows_loss_metrics_and_hooks(tmp_path: Path, step: Any) -> None:
    part = Counter(2.0, factor=0.5)
    trainer, module, rollouts = run(tmp_path, [part, step], epochs=1, advantage_scale="none")
    rows, logged = rollouts.experience, trainer.callback_metrics
    expected = 2.0 * group_advantages(rows.rewards / 2, rows.group, scale="none")
    torch.testing.assert_close(rows.advantages[:, 0], expected)
    assert float(logged["rollout/reward"]) == pytest.approx(float(rows.rewards.mean()))  # the log has the others
    assert module.order[0].function is step
    assert logged["mine/factor"] == 0.5
    assert logged["mine/rows"] == 8
    assert logged["mine/term"] == pytest.approx(float(logged["policy/entropy"]), rel=0.05)
    assert part.steps == 2
    assert part.seen == [True] * 4
    # A factor of 1/2 takes back the doubled advantages: what is left is the term.
    twin, _, _ = run(tmp_path / "other", [EntropyBonus(0.1), step], epochs=1, advantage_scale="none")
    for name in ("loss", "policy/approx_kl"):
        assert float(logged[name]) == pytest.approx(float(twin.callback_metrics[name]), rel=1e-4)


@pytest.mark.parametrize("make", [EntropyBonus, KLPenalty, lambda coef: KLInReward(coef, place="token")])
def test_a_weight_may_be_a_function_of_the_step(tmp_path: Path, make: Any) -> None:
    """One that is constant is the number; of one that decays later updates have another value."""
    given = {"number": 0.3, "constant": f"{__name__}.constant", "decays": decays}
    found = {}
    for name, coef in given.items():
        _, module, _ = run(tmp_path, [make(coef)], epochs=1)
        found[name] = weights(module)
        part = next(one for one in module.parts if type(one) is type(make(0.3)))
        assert make_part(part.plain()).plain() == part.plain()
    assert all(torch.equal(value, found["constant"][key]) for key, value in found["number"].items())
    same = make is not EntropyBonus and make is not KLPenalty  # rewards are those before the first update
    assert same == all(torch.equal(value, found["decays"][key]) for key, value in found["number"].items())
    with pytest.raises(ValueError, match="is a function of the step"):
        GRPOModule("no/model", parts=[KLPenalty(decays), KLTarget(0.1)])


def test_two_parts_of_one_class_keep_two_states_and_a_resumed_run_continues(tmp_path: Path) -> None:
    _, straight, _ = run(tmp_path / "straight", [Counter(), Counter(1.0)])
    trainer, _, _ = run(tmp_path / "stopped", [Counter(), Counter(1.0)], epochs=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    states = torch.load(tmp_path / "saved.ckpt", weights_only=True)["callbacks"]
    assert states["Counter[0]"] == states["Counter[1]"] == {"steps": 2, "iterations": 1}
    again = [Counter(), Counter(1.0)]
    _, resumed, _ = run(tmp_path / "stopped", again, ckpt=tmp_path / "saved.ckpt")
    assert [one.state_dict() for one in again] == [{"steps": 4, "iterations": 2}] * 2
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name
    loaded = GRPOModule.load_from_checkpoint(tmp_path / "saved.ckpt")
    assert [part.plain() for part in loaded.parts[3:]] == [part.plain() for part in again]  # after those of the module


def test_print_shows_what_happens_when(model: str) -> None:
    line = (
        "SHAPE halve -> POLICY OldLogprobs -> MODELS Reference -> CREDIT GroupAdvantages, Counter -> SELECT "
        "MaskTruncated | loss: dapo_loss + KLPenalty + Counter"
    )
    assert line in repr(GRPOModule(model, parts=[MaskTruncated(), Counter(), halve], kl_coef=0.1))


def test_parts_are_given_in_yaml(model: str) -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(GRPOModule, "model")
    text = f"""
model:
  model: {model}
  parts:
    - class_path: test_parts.Counter
      init_args: {{scale: 3.0}}
    - test_parts.halve
    - test_parts.Counter
    - class_path: rlhfkit.Prepare
      init_args: {{function: test_parts.halve_own, stage: CREDIT, reads: [advantages]}}
"""
    made = parser.instantiate_classes(parser.parse_string(text)).model
    assert [part.plain() for part in made.parts[3:]] == [  # after those of the module
        Counter(3.0).plain(),
        make_part(halve).plain(),
        Counter().plain(),
        Prepare(halve_own, Stage.CREDIT, reads=["advantages"]).plain(),
    ]


def test_a_part_reads_columns_that_the_module_has(model: str) -> None:
    reads = {"stage": Stage.CREDIT, "reads": ["ref_logprobs"]}
    GRPOModule(model, kl_coef=0.1, parts=[Prepare(halve, **reads)])
    with pytest.raises(ValueError, match="reads ref_logprobs, which nothing before it"):
        GRPOModule(model, parts=[Prepare(halve, **reads)])
    PPOModule(model, parts=[Prepare(halve, Stage.CREDIT, reads=["values", "returns"])])


def test_a_part_belongs_to_one_module_and_not_to_the_trainer(tmp_path: Path, model: str) -> None:
    part = Counter()
    GRPOModule(model, parts=[part])
    with pytest.raises(ValueError, match="Counter is a part of another module already"):
        GRPOModule(model, parts=[part])
    with pytest.raises(ValueError, match=r"Counter is a part of a module.*give it to GRPOModule\(parts=\[...\]\)"):
        fit_run(tmp_path, callbacks=[Counter()])


def test_a_trainer_that_fits_another_module_forgets_the_parts_of_the_first(tmp_path: Path) -> None:
    first = Counter()
    trainer, _, _ = run(tmp_path, [first], epochs=1)
    _, second, data, _ = setup_run(tmp_path / "other", module_arguments={"parts": [Counter()]})
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, data)
    assert (first.steps, second.parts[-1].steps) == (2, 2)


@pytest.mark.parametrize(("step", "message"), [(returns_nothing, "returned NoneType"), (drops_a_row, "returned 31")])
def test_a_function_that_returns_no_rows_is_told_so(tmp_path: Path, step: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run(tmp_path, [step], epochs=1)
