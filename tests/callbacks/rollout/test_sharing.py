"""An iteration that is spread over three ranks: same samples, weights and metrics as on one; errors are named.

Covers ``sharing.py``, and ``callback.py``, ``weight_sync.py`` and ``callbacks/dump.py`` on several ranks.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from modules.on_policy.preparation.test_rewards import reward_model
from rl_runs import (
    RANK,
    RANKS,
    Iterations,
    PlainGRPO,
    SaveAt,
    SharedEngine,
    digits,
    fit_run,
    on_all_ranks,
    only_odd,
    setup_run,
)
from strategies import ranks
from test_rank_store import raised

from callbacks.rollout.test_recovery import Forgetful
from callbacks.rollout.test_source import above_zero
from rlhfkit import (
    Ahead,
    DynamicSampling,
    Invariants,
    LocalEngine,
    Oversampling,
    ReplayBuffer,
    RolloutCallback,
    RolloutDump,
    RunReport,
    SamplingSpec,
)
from rlhfkit.callbacks.report.page import read_page
from rlhfkit.callbacks.rollout.micro_batching import plan_iteration
from rlhfkit.callbacks.rollout.sharing import iteration_metrics, share_iteration
from rlhfkit.data import Prompt, Sample
from rlhfkit.data.packing import IterationShape
from rlhfkit.datamodules.prompts.curriculum import BySuccess
from rlhfkit.distributed import gather_objects
from rlhfkit.modules.parts import RewardModel
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.replay import load_samples, samples_files
from rlhfkit.rollout.weight_sync import source

SAMPLING = SamplingSpec(group_size=4, max_new_tokens=8)
BY_TOKENS = {
    "parts": [{"class_path": "rlhfkit.modules.parts.token_filters.TopEntropy", "init_args": {"fraction": 0.3}}],
    "advantages": "rlhfkit.modules.on_policy.presets.optimal_token_baseline",
}
LIMIT = 8.0
"""Seconds that a collective may take while the slow engine generates."""


class Slow(LocalEngine):
    """Takes longer on rank 1 than the limit of the process group."""

    def generate(self, *args: Any, **kwargs: Any) -> list[Sample]:
        set_limit(LIMIT)
        time.sleep(1.25 * LIMIT if RANK == 1 else 0.0)
        return super().generate(*args, **kwargs)


class Dying(LocalEngine):
    """On rank 1 the engine dies when it has read one tensor."""

    def load(self, weights: Any, version: int) -> None:
        if RANK != 1:
            return super().load(weights, version)
        next(iter(weights))
        raise ConnectionError("the engine died")


def set_limit(seconds: float) -> None:
    """Change the time limit of the process group."""
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def hanging(samples: Sequence[Sample]) -> list[float]:
    """A reward that does not return on the last rank."""
    if RANK == RANKS - 1:
        threading.Event().wait(60)
    return digits(samples)


def broken(samples: Sequence[Sample]) -> list[float]:
    """A reward that fails on the last rank, while the others are still scoring."""
    if RANK == RANKS - 1:
        raise ArithmeticError("no such reward")
    threading.Event().wait(60)
    return digits(samples)


class Relax(L.Callback):
    """Sets the usual limit again when training begins."""

    def on_train_batch_start(self, *_: Any) -> None:
        set_limit(120.0)


def arguments_of(
    folder: Path, *parts: Any, reward: Any = digits, engine: Any = None, strategy: str = "ddp", **more: Any
) -> dict[str, Any]:
    """Arguments of ``fit_run``: iterations of 6 prompts x 4 samples in two updates unless told, two of them."""
    data = {"rollout_batch_size": 6, "micro_batch_size": 12 // RANKS} | more.pop("data_arguments", {})
    rollouts = {"engine": engine, "sampling": SAMPLING, "parts": parts, "rollout_timeout": more.pop("timeout", 600.0)}
    return {
        "folder": folder / f"rank{RANK}",  # ranks must not write the same model
        "module": PlainGRPO,
        "module_arguments": {"lr": 0.05, "kl_coef": 0.01} | more.pop("module_arguments", {}),
        "data_arguments": data,
        "rollouts": RolloutCallback(reward, **rollouts),
        "accumulate_grad_batches": 1,
        **on_all_ranks(strategy),
        **more,
    }


def fit(folder: Path, *parts: Any, callbacks: Sequence[L.Callback] = (), **more: Any) -> dict[str, Any]:
    """What a run was trained on, its rewards, metrics and weights, and how much of its last iteration this rank had."""
    seen = Iterations()
    trainer, _, rollouts = fit_run(**arguments_of(folder, *parts, callbacks=[seen, *callbacks], **more))
    others = ("time/", "grad_norm/", "skipped_updates")  # which differ, or are those of some strategies only
    return {
        "tokens": seen.tokens,
        "rewards": [one.reward for samples in seen.samples for one in samples],
        "weights": seen.weights,
        "metrics": {k: float(value) for k, value in trainer.callback_metrics.items() if not k.startswith(others)},
        "own": [len(rollouts.samples), len(rollouts.experience)],  # type: ignore[arg-type]
    }


def validation(folder: Path) -> dict[str, Any]:
    """40 prompts in batches of 13, so that the ranks never have equally many; the last batch has one."""
    trainer, module, data, rollouts = setup_run(**arguments_of(folder))
    data.validation_data, data.validation_split, data.validation_batch_size = data.data, "train", 13
    logged = trainer.validate(module, data, verbose=False)[0]["val/reward"]
    own = [[sample.prompt.index, sample.text] for sample in rollouts.validation_samples]
    return {"logged": logged, "texts": sorted(each for share in gather_objects(own) for each in share)}


def runs(folder: Path, place: str) -> dict[str, Any]:
    """The runs that must be the same on any number of ranks.

    Args:
        folder: Of the results.
        place: Has a reward model in ``reward``, and a checkpoint of the stream of prompts, which one rank writes.
    """
    liked = {"module_arguments": {"parts": [RewardModel(f"{place}/reward").plain()]}, "reward": None}
    page, stream = folder / "plain.html", Path(place) / "stream.ckpt"
    found = {
        "plain": fit(
            folder,
            callbacks=[Invariants(), RolloutDump(folder / "dump"), RunReport(str(page))],
            strategy="rlhf_zero3",
        ),
        "shared": fit(folder, engine=SharedEngine()),
        "liked": fit(folder, DynamicSampling(by=above_zero), **liked, callbacks=[Invariants()], strategy="rlhf_zero2"),
        "liked, shared": fit(
            folder, DynamicSampling(by=above_zero), **liked, engine=SharedEngine(), strategy="rlhf_zero3"
        ),
        # 40 prompts: those of the third iteration have been sampled before.
        "curriculum": fit(
            folder,
            reward=only_odd,
            data_arguments={"curriculum": BySuccess(), "rollout_batch_size": 18, "micro_batch_size": 36 // RANKS},
            max_epochs=3,
        ),
        "replayed": fit(
            folder, ReplayBuffer(capacity=3), reward=only_odd, module_arguments=BY_TOKENS, max_epochs=3,
            callbacks=[Invariants()],
        ),
        # Several ranks go on with the second iteration of one.
        "stream": fit(
            folder,
            data_arguments={"streaming": True, "shuffle_buffer_size": 16},
            callbacks=[SaveAt(stream, batch=2)] if RANKS == 1 else [],
            resume=None if RANKS == 1 else stream,
        ),
        "validation": validation(folder),
    }  # fmt: skip
    if RANK == 0:
        [report] = read_page(page)
        assert [one["iteration"] for one in report.samples] == [0, 1]
        for sample in (one for kept in report.samples for group in kept["groups"] for one in group["samples"]):
            assert len(sample["difference"]) == sample["length"]  # whichever rank has trained on it
    return found


def small_buckets(monkey: Any = source) -> None:
    """A tiny model in many buckets, as a large one has them."""
    original = monkey.ModuleWeights.__iter__

    def in_small_buckets(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self.bucket_bytes = 20_000
        return original(self)

    monkey.ModuleWeights.__iter__ = in_small_buckets


def failure(folder: Path, **arguments: Any) -> tuple[str, float]:
    """Type and text of what a run raises, and the seconds it took."""
    return raised(lambda: fit(folder, **{"max_epochs": 1} | arguments))


def check_ahead(folder: Path, prompts: list[list[int]]) -> None:
    """Runs that sample ahead have the prompts of one that takes turns; ``Invariants`` watches how old tokens are."""
    ahead = Ahead(1, in_flight=True)
    for parts, more in (
        ([Ahead(1)], {}),
        ([DynamicSampling(), ahead], {"reward": only_odd}),
        ([DynamicSampling(), ahead, Oversampling(0.25)], {"reward": only_odd, "engine": SharedEngine()}),
    ):
        seen, checks = Iterations(), Invariants()
        fit_run(**arguments_of(folder, *parts, callbacks=[seen, checks], **more))
        assert checks.checked == 2
        if more:
            assert all(len(each) == 6 and all(index % 2 for index in each) for each in seen.prompts)
        else:
            assert seen.prompts[:2] == prompts


def check_failures(folder: Path) -> None:
    """What fails on one rank is named on all."""
    path = folder / "inside.ckpt"
    fit(folder, callbacks=[SaveAt(path, batch=1)], max_epochs=1)
    refused, _ = failure(folder, resume=str(path))  # as DDP has saved the micro-batches of rank 0 alone
    assert f"inside an iteration and holds the micro-batches that rank 0 of {RANKS}" in refused, refused

    own = "TimeoutError: the samples of iteration 0 took longer than 3 s on rank"
    text, seconds = failure(folder, reward=hanging, timeout=3.0)
    assert own in text, text
    assert seconds < 60
    text, seconds = failure(folder, reward=broken)
    assert text == f"{'' if RANK == 2 else 'RuntimeError: rank 2 failed: '}ArithmeticError: no such reward", text
    assert seconds < 50  # the others would have scored for 60 s
    small_buckets()
    text, _ = failure(folder, engine=Dying(), strategy="rlhf_zero3")
    assert text == f"{'' if RANK == 1 else 'RuntimeError: rank 1 failed: '}ConnectionError: the engine died", text


def everything(folder: Path, place: str) -> dict[str, Any]:
    """All cases of this file."""
    found = runs(folder, place)
    slow = fit(folder, engine=Slow(), callbacks=[Relax()], max_epochs=1)
    assert slow["tokens"] == found["plain"]["tokens"][:1]
    # The requests of rank 0 find no weights twice; all ranks take part in sending them again.
    disturbed = Forgetful(*((1, 2) if RANK == 0 else ()))
    assert fit(folder, engine=disturbed)["weights"] == found["shared"]["weights"]
    assert disturbed.loads == 3 + 2
    check_ahead(folder, [list(dict.fromkeys(place[0] for place in each)) for each in found["plain"]["tokens"]])
    check_failures(folder)
    gather_objects(None)  # rank 0 ends last
    return found


def group(prompt: int, places: list[int], **metadata: Any) -> list[Sample]:
    tokens = [[5, 6, 7][: place + 1] for place in places]
    return [
        Sample(Prompt(prompt, [1, 2], metadata=metadata), place, ids, [-0.5] * len(ids), [3] * len(ids), "stop",
               reward=float(place * prompt), info={"turns": place} if prompt else {})
        for place, ids in zip(places, tokens, strict=True)
    ]  # fmt: skip


def test_rows_are_in_the_order_of_prompts_and_samples_and_metrics_know_their_sources() -> None:
    collected = CollectedGroups(
        groups=[group(9, [1, 0], source="a"), group(4, [0, 1], source="b")],
        prompts=[9, 4],
        accepted=2,
        sampled=2,
        requeued=0,
        reward=0.5,
        after={},
    )
    shared = share_iteration(
        collected,
        lambda summary: (plan_iteration(summary, IterationShape(4, 2, 2), 1), 1),
        group_size=2,
        temperature=0.5,
        rank=0,
        world_size=1,
    )
    assert shared.rows == [0, 1, 2, 3]
    assert [(one.prompt.index, one.sample_index) for one in shared.samples] == [(9, 0), (9, 1), (4, 0), (4, 1)]
    assert shared.experience.sample_index.tolist() == [0, 1, 0, 1]
    assert shared.experience.temperature == 0.5
    metrics = iteration_metrics(shared)
    assert (metrics["rollout/reward/a"], metrics["rollout/reward/b"]) == (4.5, 2.0)
    assert (metrics["rollout/turns"], metrics["rollout/length"]) == (0.5, 1.5)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("place")
    reward_model(made)
    return made


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    return runs(place / "alone", str(place))


@pytest.fixture(scope="module")
def three(place: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """One launch, after ``alone`` has saved a checkpoint; what must fail, and take long, is checked there."""
    return ranks.run(everything, 3, place / "ranks", place=str(place))


@pytest.mark.distributed
class TestThreeRanks:
    @pytest.mark.parametrize("name", ["plain", "shared", "liked", "liked, shared", "curriculum", "replayed", "stream"])
    def test_samples_rewards_weights_and_metrics_are_those_of_one_rank(
        self, alone: dict[str, Any], three: list[dict[str, Any]], name: str
    ) -> None:
        expected = alone[name]
        for found in (rank[name] for rank in three):
            assert found["tokens"] == (expected["tokens"][1:] if name == "stream" else expected["tokens"])
            assert found["rewards"] == pytest.approx(expected["rewards"][-len(found["rewards"]) :], abs=1e-5)
            assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=1e-5, nan_ok=True)

    def test_every_rank_has_a_third_of_the_samples_and_some_of_the_rows(self, three: list[dict[str, Any]]) -> None:
        samples, rows = zip(*(rank["plain"]["own"] for rank in three), strict=True)
        assert samples == (8, 8, 8)
        assert sum(rows) == 24
        assert max(rows) < 12
        assert min(rank["liked"]["own"][1] for rank in three) >= 1

    def test_validation_deals_prompts_to_ranks_and_loses_none(
        self, alone: dict[str, Any], three: list[dict[str, Any]]
    ) -> None:
        texts = alone["validation"]["texts"]
        assert [index for index, _ in texts] == list(range(40))
        recount = sum(character.isdigit() for _, text in texts for character in text) / 8 / 40
        for rank in three:
            assert rank["validation"] == {"logged": pytest.approx(recount, abs=1e-6), "texts": texts}

    def test_each_rank_dumps_its_samples_and_together_they_are_the_iteration(
        self, place: Path, three: list[dict[str, Any]]
    ) -> None:
        folder = place / "ranks" / "dump"
        files = samples_files(folder, 1)
        assert [path.name for path in files] == [f"iteration_000001.rank_{rank}_of_3.jsonl" for rank in range(3)]
        found = [
            [one.prompt.index, one.sample_index, one.token_ids.tolist()] for path in files for one in load_samples(path)
        ]
        assert sorted(found) == sorted(three[0]["plain"]["tokens"][1])
        files[1].unlink()
        with pytest.raises(
            FileNotFoundError, match=r"2 of 3 ranks of iteration 1: missing are iteration_.*rank_1_of_3"
        ):
            samples_files(folder, 1)


def test_an_iteration_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no samples of iteration 4: iteration_000004\.jsonl is missing"):
        samples_files(tmp_path, 4)
