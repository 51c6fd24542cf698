"""The head divided by vocabulary equals the head of one rank, results and gradients."""

from typing import Any

import pytest
from strategies import ranks

from rlhfkit.models.parallel.vocabulary import vocabulary_parts

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run("models.parallel.vocabulary_ranks:compare", ranks=3, folder=tmp_path_factory.mktemp("vocabulary"))


def test_log_probs_entropy_and_all_gradients_are_those_of_one_rank_on_every_rank(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report) == 24
        assert max(report.values()) < 1e-12, report


@pytest.mark.parametrize(("vocabulary", "sizes"), [(12, [4, 4, 4]), (13, [5, 4, 4]), (2, [1, 1, 0])])
def test_parts_cover_the_vocabulary_and_differ_by_one_entry_at_most(vocabulary: int, sizes: list[int]) -> None:
    parts = vocabulary_parts(vocabulary, 3)
    assert [part.stop - part.start for part in parts] == sizes
    assert [index for part in parts for index in range(part.start, part.stop)] == list(range(vocabulary))
