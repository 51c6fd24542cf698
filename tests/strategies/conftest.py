"""Shared by the strategy tests: the launcher's folder on the path, and one model folder."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama on disk."""
    import toys

    return toys.save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tied_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with tied embeddings."""
    import toys

    return toys.save_tiny_llama(tmp_path_factory.mktemp("tied"), tied=True)
