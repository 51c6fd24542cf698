"""Student and teacher compared at the selected tokens of a batch, a chunk of tokens at a time.

Only hidden states are kept for all tokens; the output layers run chunk by chunk, again in the backward pass.
Shapes: B sequences, T tokens, M selected tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlhfkit.distributed import is_sharded
from rlhfkit.models.forward import NO_ROUTER, TokenizedBatch, check_packing, next_token_inputs, replaced_head, unwrap
from rlhfkit.models.output_logits import output_logits

TeacherRows = Callable[[slice], tuple[Tensor, Tensor | None]]
"""The teacher at a slice of the M selected tokens: logits (m, V) and None, or log-probs and ids, (m, K)."""


class Comparison(NamedTuple):
    """The result of :func:`compare_logits`.

    Attributes:
        values: The sum over the tokens, or (M, ...) token by token.
        router_aux_loss: Scalar, the load-balancing loss of a mixture of experts; ``None`` unless asked for.
    """

    values: Tensor
    router_aux_loss: Tensor | None = None


@torch.no_grad()
def teacher_logits(model: nn.Module, batch: TokenizedBatch, mask: Tensor, *, packed: bool | None = None) -> TeacherRows:
    """Run a frozen model; the returned function gives the logits of a slice of the M tokens of ``mask`` (B, T-1)."""
    bare = unwrap(model)
    inputs, positions, *_ = next_token_inputs(bare, batch, mask, packed)
    known = output_logits(bare)
    if known is None:
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1)[positions]
        check_packing(model, inputs)
        return lambda part: (logits[part], None)
    layer = cast(Any, bare).get_output_embeddings()
    kept: dict[str, Any] = {}

    def select(hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)[positions]
        # ZeRO 3 gathers the weight only while its layer runs, so it is copied.
        kept["weight"] = layer.weight.clone() if is_sharded(layer.weight) else layer.weight
        kept["bias"], kept["dtype"] = layer.bias, rows.dtype
        return known.encode(rows)

    with replaced_head(bare, select):
        output = model(**inputs, use_cache=False).logits
    check_packing(model, inputs)
    rows = known.decode(output, kept["dtype"])
    return lambda part: (known.apply(linear(rows[part], kept["weight"], kept["bias"])), None)


def compare_logits(
    model: nn.Module,
    batch: TokenizedBatch,
    mask: Tensor,
    compare: Callable[[Tensor, Tensor, slice], Tensor],
    *,
    chunk_size: int,
    by_token: bool = False,
    router_aux_loss: bool = False,
    packed: bool | None = None,
) -> Comparison:
    """Apply ``compare`` to the logits of the tokens that ``mask`` (B, T-1) selects, chunk by chunk, with gradient.

    Args:
        compare: Takes logits (m, V), tokens (m,) and their slice of the M selected tokens; runs again in backward.
        chunk_size: Tokens whose logits exist at a time.
        by_token: ``compare`` returns (m, ...), which are concatenated; else a tensor, which is summed over the chunks.

    Raises:
        ValueError: If ``router_aux_loss`` is asked of a model without a router.
    """
    bare = unwrap(model)
    known = output_logits(bare)
    inputs, positions, targets, _ = next_token_inputs(bare, batch, mask, packed)

    def compared(rows: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        def one(rows: Tensor, part: slice) -> Tensor:
            return compare(head(rows), targets[part], part)

        starts = range(0, max(len(rows), 1), chunk_size)  # at least one chunk, so that an empty sum has a gradient
        parts = [slice(start, start + chunk_size) for start in starts]
        values = [checkpoint(one, rows[part], part, use_reentrant=False) for part in parts]
        return torch.cat(values) if by_token else torch.stack(values).sum(0)

    if router_aux_loss:
        inputs["output_router_logits"] = True
    if known is None:
        output = model(**inputs, use_cache=False)
        check_packing(model, inputs)
        return _result(
            compared(output.logits.flatten(0, 1)[positions], lambda rows: rows), output, bare, router_aux_loss
        )
    layer, dtype = cast(Any, bare).get_output_embeddings(), torch.float32

    def forward(hidden: Tensor) -> Tensor:
        nonlocal dtype
        rows = hidden.flatten(0, 1)[positions]
        found = compared(rows, lambda rows: known.apply(linear(rows, layer.weight, layer.bias)))
        dtype = found.dtype
        return known.encode(found)

    with replaced_head(bare, forward):
        output = model(**inputs, use_cache=False)
    check_packing(model, inputs)
    return _result(known.decode(output.logits, dtype), output, bare, router_aux_loss)


def _result(values: Tensor, output: Any, bare: nn.Module, router_aux_loss: bool) -> Comparison:
    if not router_aux_loss:
        return Comparison(values)
    balance = getattr(output, "aux_loss", None)
    if balance is None:
        raise ValueError(NO_ROUTER.format(type(bare).__name__))
    return Comparison(values, balance)
