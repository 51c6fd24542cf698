"""An iteration that is spread over three ranks: same samples, weights and metrics as on one; errors are named.

Covers ``sharing.py``, and ``callbacks/dump.py`` on several ranks.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from strategies import ranks

from callbacks.rollout import sharing_ranks
from rlhfkit.callbacks.rollout.micro_batching import plan_iteration
from rlhfkit.callbacks.rollout.sharing import iteration_metrics, share_iteration
from rlhfkit.data import Prompt, Sample
from rlhfkit.data.packing import IterationShape
from rlhfkit.rollout.collector import CollectedGroups
from rlhfkit.rollout.replay import load_samples, samples_files


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
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = sharing_ranks.runs(tmp_path_factory.mktemp("alone"))
    return json.loads(json.dumps(found))  # tuples become lists, as they do on the way from ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def three(folder: Path) -> list[dict[str, Any]]:
    return ranks.run("callbacks.rollout.sharing_ranks:everything", ranks=3, folder=folder)


@pytest.mark.distributed
class TestThreeRanks:
    """One launch; generating takes longer than the process group's time limit in one of the runs."""

    @pytest.mark.parametrize("name", ["plain", "selected", "curriculum", "replayed"])
    def test_samples_rewards_weights_and_metrics_are_those_of_one_rank(
        self, alone: dict[str, Any], three: list[dict[str, Any]], name: str
    ) -> None:
        expected = alone[name]
        for rank in three:
            assert rank[name]["iterations"] == expected["iterations"]
            assert rank[name]["weights"] == pytest.approx(expected["weights"], rel=1e-5)
            assert rank[name]["metrics"].keys() == expected["metrics"].keys()
            for metric, value in expected["metrics"].items():
                assert rank[name]["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), metric

    def test_every_rank_has_a_third_of_the_samples_and_some_of_the_rows(self, three: list[dict[str, Any]]) -> None:
        assert [rank["plain"]["own"][0] for rank in three] == [8, 8, 8]
        assert sum(rank["plain"]["own"][1] for rank in three) == 24
        assert max(rank["plain"]["own"][1] for rank in three) < 12
        assert min(rank["selected"]["own"][1] for rank in three) >= 1
        assert [rank["selected"]["own"][2] for rank in three] == [24] * 3

    def test_generating_may_take_longer_than_the_limit_of_the_group(
        self, alone: dict[str, Any], three: list[dict[str, Any]]
    ) -> None:
        assert three[0]["slow"]["iterations"] == alone["plain"]["iterations"][:1]

    def test_a_reward_that_hangs_on_one_rank_is_an_error_on_all(self, three: list[dict[str, Any]]) -> None:
        own = "TimeoutError: the samples of iteration 0 took longer than 3 s on rank 2"
        for rank, found in enumerate(three):
            text, seconds = found["hanging"]
            assert text in (own, f"RuntimeError: rank {rank} failed: {own}") or "took longer than 3 s on rank" in text
            assert seconds < 60

    def test_a_reward_that_fails_on_one_rank_ends_the_others_at_once(self, three: list[dict[str, Any]]) -> None:
        assert [found["broken"][0] for found in three] == [
            "RuntimeError: rank 2 failed: ArithmeticError: no such reward",
            "RuntimeError: rank 2 failed: ArithmeticError: no such reward",
            "ArithmeticError: no such reward",
        ]
        assert max(found["broken"][1] for found in three) < 50  # the others would have scored for 60 s

    def test_each_rank_dumps_its_samples_and_together_they_are_the_iteration(
        self, folder: Path, three: list[dict[str, Any]]
    ) -> None:
        files = samples_files(folder / "dump_3", 1)
        assert [path.name for path in files] == [f"iteration_000001.rank_{rank}_of_3.jsonl" for rank in range(3)]
        found = sorted(
            (one.prompt.index, one.sample_index, one.token_ids.tolist()) for path in files for one in load_samples(path)
        )
        expected = [(prompt, place, ids) for prompt, place, ids, _ in three[0]["plain"]["iterations"][1]]
        assert found == sorted(expected)
        files[1].unlink()
        with pytest.raises(
            FileNotFoundError, match=r"2 of 3 ranks of iteration 1: missing are iteration_.*rank_1_of_3"
        ):
            samples_files(folder / "dump_3", 1)


def test_an_iteration_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no samples of iteration 4: iteration_000004\.jsonl is missing"):
        samples_files(tmp_path, 4)


@pytest.mark.distributed
def test_a_rank_that_is_killed_while_others_wait_for_its_samples_is_named(tmp_path: Path) -> None:
    found = ranks.run_until_dead("callbacks.rollout.sharing_ranks:one_dies", ranks=2, folder=tmp_path)
    text, _ = found[0]["death"]
    assert "rank 1 has given no sign of life for" in text
    assert "while rank 0 waited for it (the samples of iteration 0)" in text
