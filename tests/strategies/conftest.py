"""Model folders that the strategy tests share."""

import pytest

from strategies import toys


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama on disk."""
    return toys.save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tied_model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with tied embeddings."""
    return toys.save_tiny_llama(tmp_path_factory.mktemp("tied"), tied=True)
