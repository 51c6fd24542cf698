"""Ring attention against packed attention on one rank; four ranks, which are two rings of two as well.

Covers ring_attention.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import ranks

from models.parallel import ring_ranks
from rlhfkit.models.attention.layout import PackedLayout
from rlhfkit.models.parallel.ring import TILE_SCORES, Ring, ring_attention, tile_size

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Largest differences over ranks, by dtype and by ranks, row, heads, window and dealing."""
    of_ranks: list[dict[str, Any]] = ranks.run(
        "models.parallel.ring_ranks:everything", ranks=4, folder=tmp_path_factory.mktemp("ring")
    )
    return {
        dtype: {name: max(of_rank[dtype][name] for of_rank in of_ranks) for name in cases}
        for dtype, cases in of_ranks[0].items()
    }


def test_outputs_and_gradients_are_exact_for_any_row_and_dealing(found: dict[str, dict[str, float]]) -> None:
    assert len(found["float64"]) == 56
    assert {name: far for name, far in found["float64"].items() if not far < 1e-12} == {}


def test_float32_differs_by_rounding(found: dict[str, dict[str, float]]) -> None:
    assert {name: far for name, far in found["float32"].items() if not far < 1e-6} == {}


def test_bfloat16_rounds_no_more_than_packed_attention(found: dict[str, dict[str, float]]) -> None:
    # Distances to float64 on the same inputs, as shares of that of packed attention.
    assert {name: far for name, far in found["bfloat16"].items() if not far < 1.2} == {}


def test_models_give_what_each_rank_alone_gives_with_any_number_of_heads(found: dict[str, dict[str, float]]) -> None:
    assert len(found["models"]) == 16
    assert {name: far for name, far in found["models"].items() if not far < 1e-12} == {}


def test_sharded_engines_get_the_same_gradients(found: dict[str, dict[str, float]]) -> None:
    # float32; relative to the largest gradient.
    assert set(found["engines"]) == {"ZeRO 2", "ZeRO 3"}
    assert {name: far for name, far in found["engines"].items() if not far < 2e-6} == {}


def test_the_first_call_of_each_group_is_made_by_all_of_its_ranks(tmp_path: Path) -> None:
    # NCCL connects the ranks of a group in its first call: one that only some of them make would wait for the others.
    calls: list[dict[str, Any]] = ranks.run("models.parallel.ring_ranks:calls_of_groups", ranks=4, folder=tmp_path)
    rings = [of_rank.pop("ring") for of_rank in calls]
    assert ["batch_isend_irecv" in ring for ring in rings] == [False, False, True, True]
    groups = {name for of_rank in calls for name in of_rank}
    assert len(groups) == (1 + 2 + 2) + (1 + 1), "of members, sequence ranks and tensor ranks, of both meshes"
    for name in groups:
        assert {of_rank[name][0] for of_rank in calls if name in of_rank} == {"all_reduce"}, name
    assert [len(of_rank) for of_rank in calls] == [5] * 4


@pytest.mark.parametrize("window", [None, 5])
def test_one_rank_needs_no_others(window: int | None) -> None:
    layout = PackedLayout.from_lengths(*[ring_ranks.ROWS["shared prefixes"][0], ring_ranks.CPU])
    inputs = ring_ranks.tensors((6, 2), len(layout.tokens), torch.float64)
    ring = Ring.of_group(layout, [torch.arange(len(layout.tokens))], None)
    expected = ring_ranks.whole(layout, inputs, window)
    assert ring_ranks.differences(ring, inputs, expected, window) < 1e-12


def test_without_gradients_nothing_is_kept() -> None:
    layout = PackedLayout.from_lengths([9], ring_ranks.CPU)
    query, key, value, _ = (x[0] for x in ring_ranks.tensors((2, 1), 9, torch.float64))
    out = ring_attention(query, key, value, Ring.of_group(layout, [torch.arange(9)], None))
    assert out.grad_fn is None


def test_scores_in_memory_are_bounded() -> None:
    assert [tile_size(heads) for heads in (1, 8, 32, 128)] == [2048, 1024, 512, 256]
    assert all(heads * tile_size(heads) ** 2 <= TILE_SCORES for heads in (3, 24, 96))
