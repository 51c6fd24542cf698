"""How a packed row is dealt to the ranks of a ring, and what is counted of it."""

import pytest
import torch

from rlhfkit.models.attention.layout import PackedLayout
from rlhfkit.models.parallel.ring_balance import balanced_blocks, ring_costs

CPU = torch.device("cpu")
ROWS = {
    "one sequence": ([4096], [0]),
    "a long one after short ones": ([64] * 40 + [3000], [0] * 41),
    "responses to a long prompt": ([1100 + 60 * i for i in range(6)], [0, *[1000] * 5]),
    "short sequences": ([100] * 40, [0] * 40),
    "fewer tokens than ranks": ([2, 1], [0, 0]),
}


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
@pytest.mark.parametrize("row", ROWS)
def test_every_token_is_dealt_once_and_all_ranks_get_equally_many(row: str, parts: int) -> None:
    layout = PackedLayout.from_lengths(ROWS[row][0], CPU, ROWS[row][1])
    blocks = balanced_blocks(layout, parts)
    assert torch.cat(blocks).sort().values.tolist() == list(range(len(layout.tokens)))
    assert all(block.equal(block.sort().values) for block in blocks)
    sizes = [len(block) for block in blocks]
    assert max(sizes) - min(sizes) <= 2


def test_one_sequence_is_dealt_in_zigzag() -> None:
    blocks = balanced_blocks(PackedLayout.from_lengths([16], CPU), 4)
    assert [block.tolist() for block in blocks] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_work_is_balanced_where_a_sequence_is_long(parts: int) -> None:
    for row in ("one sequence", "a long one after short ones"):
        layout = PackedLayout.from_lengths(*[ROWS[row][0], CPU, ROWS[row][1]])
        dealt = ring_costs(layout, balanced_blocks(layout, parts))
        contiguous = ring_costs(layout, list(torch.arange(len(layout.tokens)).tensor_split(parts)))
        assert dealt.busy > 0.97
        assert contiguous.busy < 0.7
        assert max(dealt.pairs) * parts < 1.02 * sum(dealt.pairs)


def test_short_sequences_stay_together_and_send_little() -> None:
    layout = PackedLayout.from_lengths(*[ROWS["short sequences"][0], CPU])
    assert ring_costs(layout, balanced_blocks(layout, 4)).sent_tokens == 0


def test_bytes_are_those_of_keys_and_values_and_of_float32_gradients_that_return() -> None:
    layout = PackedLayout.from_lengths([16], CPU)
    costs = ring_costs(layout, balanced_blocks(layout, 4))
    assert (costs.sent_tokens, costs.returned_tokens) == (3 * 16, 16)
    assert costs.sent_bytes(2, 8, 8, 2) == (48 * 32 * 2, 48 * 32 * 2 + 64 * 32 * 4)
    assert ring_costs(layout, [torch.arange(16)]).sent_bytes(2, 8, 8, 2) == (0, 0)
