"""From token log-probs (B, T) to sequence log-probs (B,) for preference losses, and the weights of WPO."""

import torch
from torch import Tensor

from rlhfkit.losses.aggregation import check_same_shape, full_precision, masked_mean, masked_sum, select


def sequence_logprobs(logprobs: Tensor, mask: Tensor, *, mean: bool = False) -> Tensor:
    """Log-prob of each sequence: the sum (or the mean) of the log-probs of its selected tokens.

    ``log π(y|x) = Σ_t m_t log π(y_t | x, y_<t)``

    Masked tokens get gradient 0. (TRL sums all positions and relies on masked log-probs being constant zeros.)

    Args:
        logprobs: (B, T) token log-probs on the next-token axis. Masked entries may hold anything.
        mask: (B, T), true where a token belongs to the completion.
        mean: Divide by the number of selected tokens; 0 for a sequence without any.

    Returns:
        (B,) in at least float32.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    reduce = masked_mean if mean else masked_sum
    return reduce(full_precision(logprobs), mask, -1)


def length_desensitized_logprobs(logprobs: Tensor, mask: Tensor, public_lengths: Tensor, *, alpha: float) -> Tensor:
    """Sequence log-prob in which tokens beyond the shorter answer's length are weighted by ``alpha``.

    ``Σ_{t ≤ p} log π(y_t) + α Σ_{t > p} log π(y_t)`` with the public length ``p = min(n_chosen, n_rejected)``.

    LD-DPO, Liu et al. (2024, arXiv:2409.06411). ``alpha=1`` is :func:`sequence_logprobs`, ``alpha=0``
    cuts both answers to the same length. Use it for the policy and for the reference alike, then call
    :func:`rlhfkit.losses.dpo_loss`.

    Args:
        logprobs: (B, T) token log-probs on the next-token axis. Masked entries may hold anything.
        mask: (B, T), true where a token belongs to the completion; tokens are counted along it, so gaps do not matter.
        public_lengths: (B,) tokens, ``torch.minimum(chosen_mask.sum(-1), rejected_mask.sum(-1))``.
        alpha: In [0, 1]. No default: the paper tunes it per model between 0 and 1.

    Returns:
        (B,) in at least float32.

    Raises:
        ValueError: If the shapes do not fit or ``alpha`` is out of range.
    """
    check_same_shape(logprobs=logprobs, mask=mask)
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    if public_lengths.shape != logprobs.shape[:-1]:
        raise ValueError(f"public_lengths must be {tuple(logprobs.shape[:-1])}, got {tuple(public_lengths.shape)}")
    position = mask.bool().long().cumsum(-1)  # 1 for the first selected token
    selected = select(full_precision(logprobs), mask)
    return torch.where(position <= public_lengths.unsqueeze(-1), selected, alpha * selected).sum(-1)


def wpo_weights(logprobs: Tensor, mask: Tensor, log_sum_squares: Tensor) -> Tensor:
    """Weight of one sequence in weighted preference optimisation: how likely the current policy is to write it.

    ``w(x, y) = exp(1/|y| Σ_t [log π(y_t) - log Σ_v π(v)²])``, detached.

    WPO, Zhou et al. (2024, arXiv:2406.11827), with its sampled alignment. The weight of a pair is the product of the
    weights of both answers: ``dpo_loss(..., weights=wpo_weights(chosen...) * wpo_weights(rejected...))``. Not capped,
    as in TRL 1.16; cap it with ``clamp(max=1)`` where single pairs must not dominate.

    Args:
        logprobs: (B, T) token log-probs of the policy. Masked entries may hold anything.
        mask: (B, T), true where a token belongs to the completion.
        log_sum_squares: (B, T) log of the sum over the vocabulary of squared probabilities,
            ``torch.logsumexp(2 * log_softmax(logits), -1)``.

    Returns:
        (B,) detached, in at least float32.

    Raises:
        ValueError: If the shapes differ.
    """
    check_same_shape(logprobs=logprobs, mask=mask, log_sum_squares=log_sum_squares)
    alignment = full_precision(logprobs.detach()) - full_precision(log_sum_squares.detach())
    return masked_mean(alignment, mask, -1).exp()
