"""Sampling the next token: truncation, log-probs before truncation, and one uniform number per token.

Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from rlhfkit.rollout.engine import SamplingSpec


def truncate(logits: Tensor, spec: SamplingSpec) -> Tensor:
    """Divide by the temperature and remove the tokens that min-p, top-k and top-p rule out, in vLLM's order.

    Args:
        logits: (B, V) float32.
        spec: ``temperature > 0``, ``min_p``, ``top_k``, ``top_p``.

    Returns:
        (B, V), minus infinity where a token cannot be sampled.
    """
    logits = logits / spec.temperature
    if spec.min_p > 0:  # keep p >= min_p * max p
        floor = logits.amax(-1, keepdim=True) + torch.tensor(spec.min_p, device=logits.device).log()
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if 0 < spec.top_k < logits.shape[-1]:
        floor = logits.topk(spec.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if spec.top_p < 1:  # keep the smallest set whose mass reaches top_p
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        removed = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, mass_before >= spec.top_p)
        logits = logits.masked_fill(removed, -torch.inf)
    return logits


def sample_tokens(
    logits: Tensor, uniforms: Tensor, spec: SamplingSpec, forbidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: (B, V) of any float type.
        uniforms: (B,) float64 in [0, 1).
        spec: How to sample; temperature 0 takes the most likely token.
        forbidden: (K,) token ids that must not be sampled, or ``None``.

    Returns:
        Tokens (B,) int64 and their log-probs (B,) float32 at the temperature (1 if greedy), before truncation, as the
        trainer computes them.
    """
    logits = logits.float()
    logprobs = (logits / (spec.temperature or 1.0)).log_softmax(-1)
    if forbidden is not None:
        logits = logits.index_fill(-1, forbidden, -torch.inf)
    if spec.temperature == 0:
        token = logits.argmax(-1)
    else:
        untruncated = forbidden is None and not spec.truncates
        distribution = logprobs if untruncated else truncate(logits, spec).log_softmax(-1)
        cumulative = distribution.double().exp().cumsum(-1)
        target = uniforms[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]
