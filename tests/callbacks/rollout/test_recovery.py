"""Engines that lose their weights get the current ones again, and the run continues with the same samples."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rl_runs import RANK, PlainGRPO, additions, digits, fit_run, on_all_ranks, samples_of_all_ranks, weights
from strategies import ranks

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


def run(folder: Path, engine: Any, *, group: Any = None, validate: bool = False, **options: Any) -> Any:
    """Two iterations; what was trained on, and the weights."""
    folder.mkdir(exist_ok=True)
    rollouts = RolloutCallback(digits, engine=engine, group=group, sampling=SPEC, **options)
    seen: list[tuple[int, list[tuple[int, list[int]]]]] = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(
                (
                    trainer.global_step,
                    [(one.prompt.index, one.token_ids.tolist()) for one in samples_of_all_ranks(rollouts)],
                )
            )

    data: dict[str, Any] = {"rollout_batch_size": 8, "micro_batch_size": 8}
    if validate:
        data["validation_data"] = additions(4)
    _, module, _ = fit_run(
        folder, module=PlainGRPO, rollouts=rollouts, callbacks=[Look()], data_arguments=data, max_epochs=3
    )
    return seen, weights(module), rollouts


@pytest.mark.parametrize("case", ["plain", "validation", "dynamic sampling", "episodes"])
def test_a_run_that_takes_turns_is_bitwise_the_undisturbed_one(tmp_path: Path, case: str) -> None:
    options: dict[str, Any] = {"validate": case == "validation"}
    if case == "dynamic sampling":
        options["parts"] = [DynamicSampling()]
    results = []
    for engine in (Forgetful(), Forgetful(1, 3, 4)):
        group = Episodes(Once) if case == "episodes" else None
        results.append((*run(tmp_path, engine, group=group, **options), engine))
    (seen, expected, _, calm), (again, tensors, _, disturbed) = results
    assert again == seen
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    losses = 1 if case == "episodes" else 3  # episodes that play side by side lose and get them together
    assert disturbed.loads >= calm.loads + losses
    assert disturbed.calls > calm.calls


@pytest.mark.parametrize(("loses_at", "in_flight"), [(2, False), (3, True)])
def test_sampling_ahead_begins_anew_with_the_same_prompts(tmp_path: Path, loses_at: int, in_flight: bool) -> None:
    options: dict[str, Any] = {"parts": [Ahead(1, in_flight=in_flight)]}
    seen, *_ = run(tmp_path, Forgetful(), **options)
    engine = Forgetful(loses_at)
    again, _, rollouts = run(tmp_path, engine, **options)
    assert [[index for index, _ in rows] for _, rows in again] == [[index for index, _ in rows] for _, rows in seen]
    assert not engine.lost
    assert all(
        min(sample.versions.tolist()) >= 2 for sample in rollouts.samples
    )  # of the last iteration: one older at most


def test_an_error_without_hope_ends_the_run(tmp_path: Path) -> None:
    class Hopeless(Forgetful):
        def stream(self, sampling: SamplingSpec, *, iteration: int) -> Any:
            raise EngineError("all are dead for good")

    engine = Hopeless()
    with pytest.raises(EngineError, match="dead for good"):
        run(tmp_path, engine)
    assert engine.loads == 1


def on_two_ranks(folder: Path) -> dict[str, Any]:
    """A rank: rank 0's requests find no weights twice; all ranks take part in sending them."""
    results: dict[str, Any] = {}
    for name, loses_at in (("calm", ()), ("disturbed", (1, 3))):
        engine = Forgetful(*(loses_at if RANK == 0 else ()))
        _, module, _ = fit_run(
            folder / f"rank{RANK}", module=PlainGRPO, data_arguments={"micro_batch_size": 4},
            rollouts=RolloutCallback(digits, engine=engine, sampling=SPEC), **on_all_ranks("rlhf_zero2"),
        )  # fmt: skip
        total = sum(float(tensor.double().abs().sum()) for tensor in weights(module).values())
        results[name] = [total, engine.loads]
    return results


@pytest.mark.distributed
def test_all_ranks_send_the_weights_that_rank_0_needs(tmp_path: Path) -> None:
    for report in ranks.run("callbacks.rollout.test_recovery:on_two_ranks", 2, tmp_path):
        (calm, loads), (disturbed, again) = report["calm"], report["disturbed"]
        assert disturbed == calm
        assert again == loads + 2
