"""Student and teacher compared at the selected tokens of a batch, a chunk of tokens at a time.

Only hidden states are kept for all tokens; the output layers run chunk by chunk, again in the backward pass.
Shapes: B sequences, T tokens, M selected tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from rlhfkit.data.batch import PaddedBatch
from rlhfkit.distributed import is_sharded
from rlhfkit.models.forward import (
    OutputLogits,
    TokenizedBatch,
    next_token_inputs,
    run_with_head,
    unwrap,
)
from rlhfkit.models.heads import ScalarOutput
from rlhfkit.models.parallel.joined_rows import JoinedRow
from rlhfkit.models.router_loss import router_loss

TeacherRows = Callable[[slice], Any]
"""The teacher at a slice of the M selected tokens, for a :data:`Compare`: logits (m, V) and None, or log-probs and ids
(m, K). Where a forward group computes the teacher, the tokens are those that this rank
computes, of it and of the student."""
LogitRows = Callable[[slice], tuple[Tensor, None]]
"""Logits (m, V) of a slice of the M selected tokens."""
Compare = Callable[[Tensor, Any, Tensor, float], Tensor]
"""Compares logits (m, V), the teacher at these tokens, and the tokens (m,); the number is the denominator."""


@torch.no_grad()
def teacher_logits(model: nn.Module, batch: TokenizedBatch, mask: Tensor) -> LogitRows:
    """Run a frozen model; the returned function gives the logits of some of the M tokens of ``mask`` (B, T-1)."""
    (inputs, positions, *_), *_ = next_token_inputs(unwrap(model), batch, mask)
    kept: list[tuple[OutputLogits, Tensor, Tensor | None]] = []

    def select(rows: Tensor, layer: Any, known: OutputLogits) -> Tensor:
        # ZeRO 3 gathers the weight only while its layer runs, so it is copied.
        kept.append((known, layer.weight.clone() if is_sharded(layer.weight) else layer.weight, layer.bias))
        return rows

    rows, _ = run_with_head(model, inputs, positions, select, _unchanged)
    if not kept:
        return lambda part: (rows[part], None)
    ((known, weight, bias),) = kept
    return lambda part: (known.apply(linear(rows[part], weight, bias)), None)


def _unchanged(rows: Tensor) -> Tensor:
    return rows


@torch.no_grad()
def likeliest_tokens(
    model: nn.Module, batch: TokenizedBatch, mask: Tensor, top: int, temperature: float, *, chunk_size: int = 1024
) -> Tensor:
    """(B, T-1, 2 K) float32: log-probs of the K = ``top`` likeliest tokens at ``mask`` (B, T-1), and their ids.

    ``temperature`` divides the logits. ``chunk_size`` is the number of tokens whose logits exist at a time.
    """
    rows, count = teacher_logits(model, batch, mask), int(mask.sum())
    found = torch.zeros(*mask.shape, 2 * top, device=mask.device)
    parts = []
    for start in range(0, count, chunk_size):
        logits = rows(slice(start, min(start + chunk_size, count)))[0].float() / temperature
        best = logits.log_softmax(-1).topk(top, -1)
        parts.append(torch.cat([best.values, best.indices.float()], -1))
    found[mask] = torch.cat(parts) if parts else found.new_zeros(0, 2 * top)
    return found


def compare_logits(
    model: nn.Module,
    batch: TokenizedBatch,
    mask: Tensor,
    compare: Compare,
    teacher: TeacherRows | tuple[Tensor, Tensor],
    *,
    chunk_size: int,
    denominator: float = 1.0,
    by_token: bool = False,
    router_aux_loss: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Apply ``compare`` to the logits of the tokens that ``mask`` (B, T-1) selects, chunk by chunk, with gradient.

    Args:
        compare: Runs again in backward. It must not depend on this rank's batch otherwise, as a rank of a forward
            group compares tokens of all members.
        teacher: Of :func:`teacher_logits`, or known log-probs and ids (M, K) of the batch's own tokens.
        chunk_size: Tokens whose logits exist at a time.
        denominator: What ``compare`` is given with this batch's tokens.
        by_token: ``compare`` returns (m, ...), which are concatenated; else a tensor, which is summed over the chunks.

    Returns:
        The sum over the tokens, or (M, ...) token by token; and the load-balancing loss of a mixture of experts, a
        scalar, if it is asked for.

    Raises:
        ValueError: If ``router_aux_loss`` is asked of a model without a router.
    """
    bare = unwrap(model)
    (inputs, positions, _, joined), targets, _ = next_token_inputs(bare, batch, mask)
    denominators = [denominator] if joined is None else joined.group.gather(denominator)
    rows_of = _rows_of(teacher, joined)

    def over(rows: Tensor, head: Callable[[Tensor], Tensor], among: slice, denominator: float) -> Tensor:
        def one(rows: Tensor, part: slice) -> Tensor:
            return compare(head(rows), rows_of(part), targets[part], denominator)

        # At least one chunk, so that an empty sum has a gradient.
        starts = range(among.start, max(among.stop, among.start + 1), chunk_size)
        chunks = [slice(start, min(start + chunk_size, among.stop)) for start in starts]
        values = [checkpoint(one, rows[part], part, use_reentrant=False) for part in chunks]
        return torch.cat(values) if by_token else torch.stack(values).sum(0)

    def compared(rows: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        if joined is None:
            return over(rows, head, slice(0, len(rows)), denominator)
        found = [over(rows, head, *of_member) for of_member in zip(joined.computed, denominators, strict=True)]
        return torch.cat(found) if by_token else torch.stack(found)

    def returned(values: Tensor) -> Tensor:
        if joined is None:
            return values
        return joined.to_owners(values) if by_token else joined.sums_to_owners(values)

    if router_aux_loss:
        inputs["output_router_logits"] = True

    def of_hidden(rows: Tensor, layer: Any, known: OutputLogits) -> Tensor:
        return compared(rows, lambda rows: known.apply(linear(rows, layer.weight, layer.bias)))

    found, output = run_with_head(model, inputs, positions, of_hidden, lambda logits: compared(logits, _unchanged))
    return returned(found), router_loss(bare, output, joined) if router_aux_loss else None


def _rows_of(teacher: TeacherRows | tuple[Tensor, Tensor], joined: JoinedRow | None) -> TeacherRows:
    """The teacher at the tokens that this rank computes."""
    if not isinstance(teacher, tuple):
        return teacher
    values, ids = teacher if joined is None else (joined.from_owners(known) for known in teacher)
    return lambda part: (values[part], ids[part])


# ---------------------------------------------------------------- judges that are language models


def word_log_odds(
    model: nn.Module, batch: PaddedBatch, mask: Tensor, words: tuple[int, int], *, router_aux_loss: bool = False
) -> ScalarOutput:
    """The logit of one word minus that of another as the next token, which is the log-odds between the two.

    ``log p(a|x) - log p(b|x) = z_a - z_b``, so the softmax over the two words alone is its sigmoid.

    Args:
        model: A causal language model.
        batch: B sequences.
        mask: (B, T) bool, the tokens after which the words are compared, the last one of a sequence too.
        words: Token ids a and b.
        router_aux_loss: Compute the load-balancing loss of a mixture of experts.

    Returns:
        Values (B, T) float32, 0 at other tokens, with gradient where it is enabled.
    """

    def compare(logits: Tensor, teacher: tuple[Tensor, Tensor | None], tokens: Tensor, _: float) -> Tensor:
        chosen = logits[:, list(words)].float()
        return chosen[:, 0] - chosen[:, 1]

    def none(part: slice) -> tuple[Tensor, Any]:
        return batch.input_ids[:0], None

    # A word after the last token would be at T + 1; the padding in its place is only counted, not computed.
    wider = batch.pad(batch.input_ids.shape[1] + 1)
    found, balance = compare_logits(
        model, wider, mask, compare, none, chunk_size=4096, by_token=True, router_aux_loss=router_aux_loss
    )
    values = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return ScalarOutput(values.masked_scatter(mask, found), balance)


def word_token(tokenizer: Any, word: str) -> int:
    """Token id of a word; ValueError if it is not one token of the tokenizer."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"{word!r} must be one token, and the tokenizer makes {ids} of it: take another word, or add it as a token"
        )
    token: int = ids[0]
    return token
