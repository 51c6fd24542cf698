"""A row alone against the row among others."""

import pytest
import torch
from tiny_models import tiny_model

from models.test_forward import experience
from rlhfkit.models import load_causal_lm, load_scalar_model
from rlhfkit.models.heads import ROW_TOLERANCES, row_difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_what_it_is_alone_unless_others_are_seen(folder: str, kind: str, dtype: torch.dtype) -> None:
    load = load_causal_lm if kind == "policy" else load_scalar_model
    model = load(folder, dtype=dtype).eval()
    batch = experience([(3, 5), (7, 1), (1, 9), (4, 4)])
    tolerance = ROW_TOLERANCES[dtype]
    assert all(row_difference(model, batch, row) < tolerance / 10 for row in range(4))
    inner = model if kind == "policy" else model.model
    if kind == "critic":
        with torch.no_grad():
            inner.score.weight *= 30  # a new head gives numbers of a hundredth
    inner.get_input_embeddings().register_forward_hook(lambda _, __, out: out + 10 * out.mean(1, keepdim=True))
    assert all(row_difference(model, batch, row) > tolerance for row in range(4))


def test_two_forward_passes_are_made_whatever_the_batch(folder: str) -> None:
    """Where weights are sharded, every rank takes part in every pass."""
    model = load_causal_lm(folder).eval()
    passes: list[int] = []
    model.base_model.register_forward_hook(lambda *_: passes.append(1))
    row_difference(model, experience([(3, 5)]), 0)
    first = len(passes)
    row_difference(model, experience([(3, 5), (2, 2), (9, 9)]), 2)
    assert (first, len(passes)) == (2, 4)
