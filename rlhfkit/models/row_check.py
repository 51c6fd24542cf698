"""One row of a batch alone against the same row among others: no row may see another.

:mod:`rlhfkit.models.attention.families` knows which families are packed; this checks a model itself with real tokens.
"""

import torch
from torch import nn

from rlhfkit.models.forward import TokenizedBatch, UnpaddedBatch, policy_output, unwrap
from rlhfkit.models.heads import ScalarModel, scalar_output

ROW_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Allowed mean difference over the tokens of a row, in nats (for a scalar model: relative to its numbers' size, where
above 1). In float32 sums in another order give about 1e-5, in float64 too, where norms and log-probs are still float32.
bfloat16 rounds a logit of 20 to multiples of 0.1, and tokens of a mixture of experts can change experts; averaged over
a row that gives a few hundredths, while rows that see one another differ by 0.5 and more.
"""


@torch.no_grad()
def row_difference(model: nn.Module, batch: TokenizedBatch, row: int) -> float:
    """Mean difference over a row's tokens between the row in its batch and alone, by two forward passes in eval mode.

    Log-probs in nats; a :class:`~rlhfkit.models.ScalarModel`'s numbers divided by their mean size where that is above
    1. Not finite if one of the numbers is not.
    """
    real = batch.attention_mask.bool()
    attachments = getattr(batch, "attachments", None)
    single = UnpaddedBatch(
        batch.input_ids[row : row + 1, : int(real[row].sum())],
        None if attachments is None else attachments[row : row + 1],
    )
    chosen = torch.zeros_like(real)
    chosen[row] = real[row]
    if isinstance(unwrap(model), ScalarModel):
        among, alone = scalar_output(model, batch, chosen)[chosen], scalar_output(model, single)[0]
        scale = max(float(alone.abs().mean()), 1.0)
    else:
        chosen, wanted = chosen[:, 1:], single.attention_mask[:, 1:]
        among = policy_output(model, batch, chosen).logprobs[chosen]
        alone, scale = policy_output(model, single, wanted).logprobs[0], 1.0
    return float((among - alone).abs().mean()) / scale if len(among) else 0.0
