"""Forward passes of several ranks equal those of each rank alone.

Covers joined_rows.py, ulysses.py and router_loss.py.
"""

from typing import Any

import pytest
from strategies import ranks

from models.parallel.sequence_ranks import CASES


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return ranks.run("models.parallel.sequence_ranks:everything", ranks=2, folder=folder, sequence=2)


@pytest.mark.smoke
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_each_alone(case: str, two: list[dict[str, Any]]) -> None:
    # Transformers sums the routers' probabilities in float32.
    tolerance = 2e-6 if case.startswith("router") else 1e-12
    for found in two:
        assert found[case]["outputs"] < tolerance
        assert found[case]["loss"] < tolerance
        assert found[case]["gradients"] < tolerance * max(found[case]["largest gradient"], 1.0)
