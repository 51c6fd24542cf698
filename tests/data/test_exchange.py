"""Rows that move between three ranks over gloo; and streams that differ between ranks are refused."""

from pathlib import Path

import pytest
from strategies import ranks


@pytest.mark.distributed
def test_any_rows_on_any_ranks_arrive_as_they_were_in_the_whole_iteration(tmp_path: Path) -> None:
    for report in ranks.run("data.exchange_ranks:everything", ranks=3, folder=tmp_path):
        assert report["wrong"] == []
        same, different = report["streams"]
        assert len(same) == 32
        assert "the ranks read different rows from the given rows" in different
