"""A tile of attention and the joining of tiles, against softmax over all keys in float64."""

import torch

from rlhfkit.models.parallel.ring_tiles import NOTHING, join_, tile_backward, tile_forward


def made() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5, 4), (2, 7, 4), (2, 7, 6), (2, 3, 5, 6))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_joined_tiles_are_attention_over_all_keys() -> None:
    query, key, value, weights = made()
    for tensor in (query, key, value):
        tensor.requires_grad_()
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[:, 0], mask[2, :3], mask[2, 3] = True, False, True  # the third query sees nothing of the first tile
    scores = (0.3 * query @ key[:, None].mT).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value[:, None]
    gradients = torch.autograd.grad((expected * weights).sum(), (query, key, value))

    query, key, value = (tensor.detach() for tensor in (query, key, value))
    out, logsumexp = torch.zeros_like(expected), torch.full(expected.shape[:3], NOTHING, dtype=torch.float64)
    pieces = [slice(0, 3), slice(3, 4), slice(4, 7)]
    for piece in pieces:
        of_tile = tile_forward(query, key[:, piece], value[:, piece], mask[:, piece], 0.3)
        join_(out, logsumexp, *of_tile)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)

    product = (weights * out).sum(-1)
    parts = [
        tile_backward(weights, query, key[:, piece], value[:, piece], mask[:, piece], 0.3, logsumexp, product)
        for piece in pieces
    ]
    found = (sum(part[0] for part in parts), *(torch.cat([part[i] for part in parts], 1) for i in (1, 2)))
    for mine, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_no_key_of_a_tile_changes_nothing() -> None:
    query, key, value, _ = made()
    out, logsumexp = tile_forward(query, key, value, torch.zeros(5, 7, dtype=torch.bool), 1.0)
    assert not out.any()
    assert (logsumexp == NOTHING).all()


def test_large_scores_do_not_overflow() -> None:
    query, key, value, _ = (tensor.float() for tensor in made())
    out, logsumexp = tile_forward(100 * query, 100 * key, value, None, 1.0)
    exact = (100 * query.double() @ (100 * key.double())[:, None].mT).softmax(-1) @ value.double()[:, None]
    assert logsumexp.isfinite().all()
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
