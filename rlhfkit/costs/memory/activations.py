"""Bytes of activations: what autograd saves of a layer, what its backward pass adds, and the output layer.

The method is that of Korthikanti et al. (2022, arXiv:2205.05198, section 4.1), who count the saved tensors of a GPT
layer; here they are counted for the layers of Transformers' decoder-only models (RMSNorm in float32, rotary positions,
grouped heads, gated feed-forward block) as PyTorch saves them without fusion, and checked by measurement
(``benchmarks/estimate.py``). N are tokens of a micro-batch, b bytes of a number in matrix products, H, Q, K, V, O, I
the widths of :class:`~rlhfkit.costs.model_shape.LayerShape` (hidden, query, key, value, attention's output,
feed-forward).
"""

from rlhfkit.costs.model_shape import LayerShape, ModelShape
from rlhfkit.losses.fused_head.tiles import DEFAULT_TILE_BYTES, MAX_ROWS, TILE_BYTES

_FULL = 4  # bytes of float32, in which norms and softmax statistics are computed


def layer_bytes(
    layer: LayerShape,
    tokens: float,
    *,
    itemsize: int,
    residual_itemsize: int | None = None,
    attention: str = "packed",
    longest: float = 0.0,
    tensor: int = 1,
    repeated_keys: float = 1.0,
    tiled: bool = False,
) -> float:
    """Bytes that autograd saves of one layer.

    Per token: two norms ``2 (4 H + r H)`` (their float32 input and the normalised output) and the inputs of the
    projections after them ``2 b H``; attention ``b (Q + K + V + 2 O) + 4 heads`` (the last: log-sum-exp); the
    feed-forward block ``4 b I`` with a gate, ``2 b I`` without. Norms of queries and keys add ``(4 + b) (Q + K)``. A
    mixture saves the gathered inputs and the weighted outputs of each chosen expert: ``2 b H`` each. ``eager``
    attention saves scores and probabilities: ``heads * longest * (b + 4)``. Tensor parallelism divides what belongs to
    heads and to the feed-forward block; norms and the inputs of projections are whole on every rank (Korthikanti et
    al., section 4.2).

    Args:
        layer: Widths.
        tokens: N.
        itemsize: b.
        residual_itemsize: r, of the residual stream; ``None``: b. With autocast it is 4, and each of the seven
            projections saves a cast input of its own.
        attention: ``eager`` or another.
        longest: Tokens of the longest sequence, for ``eager``.
        tensor: Ranks that divide heads and feed-forward block.
        repeated_keys: How often keys and values are held, where Ulysses has fewer of their heads than ranks.
        tiled: Whether the feed-forward block is recomputed in tiles (``tiled_mlp``), so that nothing is saved of it.
    """
    residual = residual_itemsize or itemsize
    hidden, projections = layer.hidden, 2 * itemsize
    if residual != itemsize:
        projections = 2 * residual + 5 * itemsize  # q, k, v, gate and up cast their input
    norms = 2 * (_FULL + residual) * hidden + projections * hidden
    attended: float = (
        itemsize * (layer.query + repeated_keys * (layer.key + layer.value) + 2 * layer.attention_output)
        + _FULL * layer.heads
    )
    if attention == "eager":
        attended += layer.heads * longest * (itemsize + _FULL)
    if layer.normalized_heads:
        attended += (_FULL + itemsize) * (layer.query + layer.key)
    feed_forward = 0 if tiled else (4 if layer.gated else 2) * itemsize * layer.intermediate
    experts = 2 * itemsize * hidden * layer.experts_per_token
    return tokens * (norms + (attended + feed_forward) / tensor + experts)


def backward_bytes(
    layer: LayerShape, tokens: float, *, itemsize: int, tensor: int = 1, tile: float | None = None
) -> float:
    """Bytes that the backward pass of one layer holds beside all its saved tensors, at its widest place.

    That is the feed-forward block. While the gradient of the product is formed, that of the last weight exists too:
    ``b (N I + H I)``; then both factors' gradients beside the product's, whose own saved input is freed: ``2 b N I``.
    The larger of the two, and gradients of the residual stream ``2 b N H``. Tensor parallelism divides I.

    In tiles of t tokens the block is recomputed, ``4 b t I``, and N is t there. Attention is then the widest place:
    gradients of queries, keys, values and outputs, ``b N (Q + K + V + O)``.
    """
    tiled = tile is not None and tile < tokens
    block = (tile if tile is not None and tiled else tokens) * layer.intermediate / tensor
    weight = layer.hidden * layer.intermediate / max(layer.experts_per_token, 1) / tensor
    widest = max(2 * block, block + weight)
    if tiled:
        attended = tokens * (layer.query + layer.key + layer.value + layer.attention_output) / tensor
        widest = max(widest + (4 if layer.gated else 2) * block, attended)
    return itemsize * (widest + 2 * tokens * layer.hidden)


def saved_bytes(
    shape: ModelShape,
    tokens: float,
    *,
    itemsize: int,
    residual_itemsize: int | None = None,
    gradient_checkpointing: bool = False,
    attention: str = "packed",
    longest: float = 0.0,
    tensor: int = 1,
    repeated_keys: float = 1.0,
    tiled: bool = False,
) -> float:
    """Bytes that autograd holds of all layers between forward and backward.

    Without checkpointing ``L`` times :func:`layer_bytes`, with it the input of each layer, ``L b N H``. The last norm
    adds ``(4 + b) N H``.
    """
    residual = residual_itemsize or itemsize
    last = tokens * shape.layer.hidden * (_FULL + residual)
    if gradient_checkpointing:
        return shape.layers * tokens * shape.layer.hidden * residual + last
    one = layer_bytes(
        shape.layer,
        tokens,
        itemsize=itemsize,
        residual_itemsize=residual_itemsize,
        attention=attention,
        longest=longest,
        tensor=tensor,
        repeated_keys=repeated_keys,
        tiled=tiled,
    )
    return shape.layers * one + last


def head_bytes(
    shape: ModelShape,
    tokens: float,
    *,
    itemsize: int,
    fused: bool = True,
    entropy: bool = False,
    trained: bool = True,
    device: str = "cuda",
    tensor: int = 1,
) -> float:
    """Bytes that the output layer and the loss hold at their widest place, M tokens of a vocabulary of W entries.

    Fused (:func:`~rlhfkit.losses.linear_logprobs`): the selected hidden states and their gradient ``(2 b + 4) M H``,
    the gradient of the weight before it is added ``b W H`` (twice when tied, the embedding has one too), and the
    buffers of one tile of logits. Dense: logits, those of the selected tokens, and their gradient: ``3 b M W``. Of T
    tensor ranks each computes W / T entries; the weight, and its gradient, are whole on all.
    """
    hidden = shape.layer.hidden
    weight = itemsize * shape.vocabulary * hidden * (2 if shape.tied else 1) if trained else 0.0
    selected = tokens * hidden * itemsize
    if not fused:
        return 3 * itemsize * tokens * shape.vocabulary + 2 * selected + weight
    gradients = tokens * hidden * (_FULL + (itemsize if itemsize < _FULL else 0))
    return selected + gradients + weight + tile_bytes(shape.vocabulary // tensor, tokens, itemsize, entropy, device)


def tile_bytes(vocabulary: int, tokens: float, itemsize: int, entropy: bool, device: str) -> float:
    """Bytes of the buffers of one tile: raw logits and a second buffer where one is needed.

    On GPUs compiled kernels need the raw logits and their gradient. On CPUs narrow types need a float32 buffer, and
    the entropy another one (:class:`~rlhfkit.losses.fused_head.tiles.Tiles`); PyTorch's kernels there make one more
    float32 copy of a narrow tile.
    """
    rows = max(1.0, min(tokens, MAX_ROWS))
    limit = TILE_BYTES.get(device, DEFAULT_TILE_BYTES)
    columns = min(vocabulary, max(256, limit // (rows * itemsize) // 256 * 256))
    buffers = itemsize + (itemsize if device != "cpu" else 0)
    if device == "cpu":
        buffers += (2 * _FULL if itemsize < _FULL else 0) + (_FULL if entropy else 0)
    return rows * columns * buffers


def inference_bytes(shape: ModelShape, tokens: float, *, itemsize: int, tensor: int = 1) -> float:
    """Bytes of activations of a forward pass without gradient: one layer's feed-forward block at its widest place.

    ``b N (3 I + 3 H)``: gate, up and their product, the residual stream, its norm and the block's input.
    Tensor parallelism divides I.
    """
    return itemsize * tokens * (3 * shape.layer.intermediate / tensor + 3 * shape.layer.hidden)
