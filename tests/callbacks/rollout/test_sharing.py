"""An iteration that is spread over three ranks: same samples, weights and metrics as on one; errors are named.

Covers ``sharing.py``, and ``callback.py``, ``weight_sync.py`` and ``callbacks/dump.py`` on several ranks.
"""

from pathlib import Path
from typing import Any

import pytest
from modules.on_policy.preparation.test_rewards import reward_model
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("place")
    reward_model(made)
    return made


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Any]:
    return sharing_ranks.runs(place / "alone", str(place))


@pytest.fixture(scope="module")
def three(place: Path, alone: dict[str, Any]) -> list[dict[str, Any]]:
    """One launch, after ``alone`` has saved a checkpoint; what must fail, and take long, is checked there."""
    return ranks.run("callbacks.rollout.sharing_ranks:everything", 3, place / "ranks", place=str(place))


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


@pytest.mark.distributed
def test_a_rank_that_is_killed_while_others_wait_for_its_samples_is_named(tmp_path: Path) -> None:
    text = ranks.run_until_dead("callbacks.rollout.sharing_ranks:one_dies", 2, tmp_path)[0]
    assert "rank 1 has given no sign of life for" in text
    assert "while rank 0 waited for it (the samples of iteration 0)" in text
