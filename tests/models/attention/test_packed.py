"""Packed attention against one sequence at a time."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlhfkit.models.attention.layout import PackedLayout
from rlhfkit.models.attention.packed import packed_attention


def packed(lengths: list[int], heads: int = 4, key_heads: int = 2, size: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(1, heads, sum(lengths), size)] + [(1, key_heads, sum(lengths), size)] * 2
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


@pytest.mark.parametrize("lengths", [[5], [1, 1], [3, 9, 1, 4, 8, 2], [16, 16, 16], [33, 2, 31]])
@pytest.mark.parametrize("window", [None, 3])
def test_each_sequence_attends_to_itself_alone(lengths: list[int], window: int | None) -> None:
    query, key, value = packed(lengths)
    layout = PackedLayout.from_lengths(lengths, query.device)
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, sliding_window=window, packed_layout=layout)
    first = 0
    for length in lengths:
        piece = slice(first, first + length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        mask = (distance >= 0) & (distance < (window or length))
        alone = scaled_dot_product_attention(
            query[:, :, piece], key[:, :, piece], value[:, :, piece], attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(out[:, piece], alone.transpose(1, 2), rtol=1e-12, atol=1e-12)
        first += length


def test_a_nan_in_one_sequence_stays_there() -> None:
    lengths = [4, 3, 5]
    query, key, value = packed(lengths)
    value[:, :, 5] = torch.nan  # second token of the second sequence
    layout = PackedLayout.from_lengths(lengths, query.device)
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed_layout=layout)
    assert out[:, :4].isfinite().all()
    assert out[:, 7:].isfinite().all()
    assert out[:, 5:7].isnan().all()


def test_positions_restart_in_every_sequence() -> None:
    layout = PackedLayout.from_lengths([3, 1, 2], torch.device("cpu"))
    assert layout.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]


def test_a_shared_prefix_is_computed_once_and_seen_by_every_row_that_has_it() -> None:
    rows = [[5, 6, 7, 8], [5, 6, 7, 9, 9], [5, 6, 3], [5, 6, 3], [4, 6]]
    input_ids = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    layout, tokens = PackedLayout.from_batch(input_ids, input_ids != 0)
    assert tokens.tolist() == [[5, 6, 7, 8, 9, 9, 3, 4, 6]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 2, 0, 1]]
    query, key, value = packed([9])
    out, _ = packed_attention(torch.nn.Identity(), query, key, value, None, packed_layout=layout)
    for row, ids in enumerate(rows):
        piece = layout.places[row, : len(ids)]
        assert tokens[0, piece].tolist() == ids
        alone = scaled_dot_product_attention(
            query[:, :, piece], key[:, :, piece], value[:, :, piece], is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[:, piece], alone.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_padding_within_a_bucket_is_less_than_twofold() -> None:
    lengths = list(range(1, 65))
    layout = PackedLayout.from_lengths(lengths, torch.device("cpu"))
    for bucket in layout.buckets:
        assert bucket.gather.numel() < 2 * len(bucket.real)


def test_a_layer_that_is_not_causal_sees_everything() -> None:
    query, key, value = packed([6])
    tower = torch.nn.Identity()
    tower.is_causal = False
    out, _ = packed_attention(tower, query, key, value, None)
    everything = scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(out, everything.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_a_layout_knows_which_layers_have_read_it() -> None:
    query, key, value = packed([2, 3])
    layout = PackedLayout.from_lengths([2, 3], torch.device("cpu"))
    layers = [torch.nn.Identity(), torch.nn.Identity()]
    for layer in layers:
        packed_attention(layer, query, key, value, None, packed_layout=layout)
    assert layout.readers == {id(layer) for layer in layers}
