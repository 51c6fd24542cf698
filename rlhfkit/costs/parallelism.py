"""Sequence and tensor parallelism: what the ranks of a forward group hold and send besides, and what is refused.

The ranks of a group compute the forward passes of all their micro-batches together (:mod:`rlhfkit.mesh`). n are the
tokens that a rank computes of them, S and T the sizes of the two dimensions, b bytes of a number, Q, K, V, O, H the
widths of :class:`~rlhfkit.costs.model_shape.LayerShape`.
"""

import math

from rlhfkit.costs.model_shape import LayerShape, ModelShape
from rlhfkit.costs.run import Run, Sharding
from rlhfkit.models.parallel.ring import TILE_SCORES

JOINED_BYTES_PER_TOKEN = 64
"""Of the joined row of a forward group, on each of its ranks: token ids, positions, targets, and where sequences begin;
int64. It does not shrink with the size of the group."""
_FULL = 4


def on_rank(shape: ModelShape, parameters: float, tensor: int) -> float:
    """Parameters of which a tensor rank has numbers: its part of the divided matrices, and all of the others.

    Embeddings, output layer and norms are whole on every rank.
    """
    return max(parameters - shape.divisible * (1 - 1 / tensor), 0.0)


def trained_on_rank(shape: ModelShape, tensor: int) -> float:
    """Trained parameters of which a tensor rank has numbers; adapters count as whole on all, a little too much."""
    return float(shape.adapters) or on_rank(shape, shape.parameters, tensor)


def dealt_ranks(layer: LayerShape, sharding: Sharding) -> tuple[int, int]:
    """Sequence ranks that exchange tokens for heads, and places in the ring of such groups; their product is S.

    Ulysses is (S, 1), a ring (1, S); the hybrid exchanges among as many neighbours as divide the heads.
    """
    size, kind = sharding.sequence, sharding.sequence_parallel
    if kind != "hybrid":
        return (size, 1) if kind == "ulysses" else (1, size)
    neighbours = math.gcd(max(layer.heads // sharding.tensor, 1), size)
    return neighbours, size // neighbours


def repeated_keys(layer: LayerShape, sharding: Sharding) -> float:
    """How often ranks that exchange heads hold keys and values: more than once where they do not divide their heads."""
    neighbours, _ = dealt_ranks(layer, sharding)
    heads = max((layer.key_heads or layer.heads) // sharding.tensor, 1)
    return math.lcm(heads, neighbours) / heads


# ------------------------------------------------------------------------------------------------ memory


def exchange_bytes(layer: LayerShape, tokens: float, sharding: Sharding, *, itemsize: int) -> float:
    """Bytes of buffers beside saved tensors while a layer's attention exchanges numbers between sequence ranks.

    Ulysses: what is sent and what arrives, ``2 b n (Q + K + V) / T``. A ring, in its backward pass: three blocks of
    keys and values (the own one, that in use, the next one), ``3 b n (K + V) / T``, gradients of four and of the
    queries in float32, ``4 n (4 (K + V) + Q) / T``, and two tiles of scores. The hybrid has both.
    """
    neighbours, places = dealt_ranks(layer, sharding)
    keys, held = repeated_keys(layer, sharding) * (layer.key + layer.value), 0.0
    if neighbours > 1:
        held += 2 * itemsize * tokens * (layer.query + keys) / sharding.tensor
    if places > 1:
        numbers = 3 * itemsize * keys + _FULL * (4 * keys + layer.query)
        scores = min(_FULL * layer.heads / sharding.tensor * tokens**2, _FULL * TILE_SCORES)
        held += tokens * numbers / sharding.tensor + 2 * scores
    return held


def joined_bytes(run: Run) -> float:
    """Bytes of the integers that describe the joined row of a forward group, whole on every rank."""
    return JOINED_BYTES_PER_TOKEN * run.micro_batch_tokens if run.sharding.group > 1 else 0.0


# ------------------------------------------------------------------------------------------------ messages


def ulysses_bytes(layer: LayerShape, tokens: float, sharding: Sharding, *, itemsize: int) -> float:
    """Bytes that a rank sends in one layer's forward pass; the backward pass sends as many.

    Queries, keys and values of the own tokens go to the ranks that have their heads, and the outputs come back:
    ``b n (Q + K + V + O) / T * (S - 1) / S``. With as many key heads as heads ``4 b n H``, n = N / S of a row of N
    tokens: Jacobs et al. (DeepSpeed-Ulysses, 2023, arXiv:2309.14509, section 3.2).
    """
    size, _ = dealt_ranks(layer, sharding)
    numbers = layer.query + repeated_keys(layer, sharding) * (layer.key + layer.value) + layer.attention_output
    return itemsize * tokens * numbers / sharding.tensor * (size - 1) / size


def ring_bytes(layer: LayerShape, tokens: float, sharding: Sharding, *, itemsize: int, backward: bool = False) -> float:
    """Bytes that a rank sends in one layer's forward pass: every other block of keys and values passes through it.

    ``b n (K + V) / T * (S - 1)``: it does not shrink with more ranks (n S tokens), but is sent while the block before
    is computed: Liu et al. (2023, arXiv:2310.01889, section 3). The backward pass sends the blocks again, and their
    gradients, which return to their own rank, ``4 n (K + V) / T * S`` in float32. An upper bound: a block ends its
    travel where no query sees a key of it any more. In the hybrid (Fang and Zhao, 2024, arXiv:2405.07719) S are the
    places of the ring only.
    """
    _, places = dealt_ranks(layer, sharding)
    keys = repeated_keys(layer, sharding) * (layer.key + layer.value)
    gradients = _FULL * places if backward and places > 1 else 0
    return tokens * keys / sharding.tensor * (itemsize * (places - 1) + gradients)


def tensor_bytes(layer: LayerShape, tokens: float, sharding: Sharding, *, itemsize: int) -> float:
    """Bytes that a rank sends in one layer's forward pass; the backward pass sends as many.

    Two all-reduces of the residual stream, one after attention and one after the feed-forward block (Shoeybi et al.,
    Megatron-LM, 2019, arXiv:1909.08053, section 3), of ``2 b n H (T - 1) / T`` each (Patarasuk and Yuan, 2009, a ring).
    """
    return 2 * 2 * itemsize * tokens * layer.hidden * (sharding.tensor - 1) / sharding.tensor


# ------------------------------------------------------------------------------------------------ what is refused


def refusals(role: str, shape: ModelShape, sharding: Sharding) -> list[str]:
    """Why a model cannot be computed by forward groups of these sizes; empty: it can."""
    return [f"{role}: {problem}" for problem in [*_tensor_refusals(shape, sharding), *_head_refusals(shape, sharding)]]


def _tensor_refusals(shape: ModelShape, sharding: Sharding) -> list[str]:
    size, layer = sharding.tensor, shape.layer
    if size == 1:
        return []
    if shape.experts:
        return [
            "tensor_parallel_size > 1 does not support mixtures of experts: use ZeRO 3, or sequence parallelism for "
            "long rows"
        ]
    if not shape.divisible:
        return [
            f"Transformers has no tensor-parallel plan for the family {shape.family!r}, or one that DeepSpeed cannot "
            "follow: use ZeRO 3"
        ]
    widths = {
        "attention heads": layer.heads,
        "key heads": layer.key_heads or layer.heads,
        "numbers of the feed-forward block": layer.intermediate,
    }
    return [
        f"tensor_parallel_size={size} does not divide the {width:,} {name}"
        for name, width in widths.items()
        if width % size
    ]


def _head_refusals(shape: ModelShape, sharding: Sharding) -> list[str]:
    """Ulysses needs whole heads on every rank, and a ring does not."""
    size, tensor = sharding.sequence, sharding.tensor
    if size == 1 or sharding.sequence_parallel != "ulysses" or shape.layer.heads % tensor:
        return []
    heads = shape.layer.heads // tensor
    each = f" of a tensor rank (tensor_parallel_size={tensor})" if tensor > 1 else ""
    cure = "choose another size, or sequence_parallel='ring' or 'hybrid'"
    if heads % size:
        return [f"sequence_parallel_size={size} does not divide the {heads} attention heads{each}: {cure}"]
    return []
