"""What the tests of several files here share."""

from typing import Any

import pytest
from strategies import ranks


@pytest.fixture(scope="session")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two training ranks found, with critics and a reference elsewhere, in one launch with one Ray."""
    folder = tmp_path_factory.mktemp("two_ranks")
    found: list[dict[str, Any]] = ranks.run("roles.critic_ranks:train", 2, folder)
    return found
