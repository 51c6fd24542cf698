"""``word_log_odds``: how much likelier one word is than another after some tokens, for judges that are language models.

Shapes: B sequences, T tokens, M selected tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlhfkit.data.batch import PaddedBatch
from rlhfkit.models.distillation import Comparison, compare_logits


def word_log_odds(
    model: nn.Module, batch: PaddedBatch, mask: Tensor, words: tuple[int, int], *, router_aux_loss: bool = False
) -> Comparison:
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
    found = compare_logits(
        model, wider, mask, compare, none, chunk_size=4096, by_token=True, router_aux_loss=router_aux_loss
    )
    values = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return Comparison(values.masked_scatter(mask, found.values), found.router_aux_loss)


def word_token(tokenizer: Any, word: str) -> int:
    """Token id of a word; ValueError if it is not one token of the tokenizer."""
    ids = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
        raise ValueError(
            f"{word!r} must be one token, and the tokenizer makes {ids} of it: take another word, or add it as a token"
        )
    token: int = ids[0]
    return token
